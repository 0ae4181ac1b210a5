"""Google's ``generateContent``: a dialect of the recording endpoint, for gemini-cli and the like."""
