"""Tools of MCP servers, for a file of functions: the key ``mcp``."""
