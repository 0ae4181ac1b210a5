GORILLA_TO_OPENAPI = {"dict": "object", "float": "number", "integer": "integer", "string": "string"}
