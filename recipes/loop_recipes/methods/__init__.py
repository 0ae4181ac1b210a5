"""Methods of papers beside the loop, a file or folder each, with their commands; and what such commands share."""
