from mcp.server import MCPServer

server = MCPServer("notes")


@server.tool()
def read_note(number: int) -> str:
    """Read a note."""
    return f"note {number} says {number * 3}"


if __name__ == "__main__":
    server.run()
