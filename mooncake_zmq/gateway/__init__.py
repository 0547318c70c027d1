"""The owner of requests and the face to clients."""
