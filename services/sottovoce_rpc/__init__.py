"""Code shared by all services: wire encoding of tensors, errors as status codes, server start and shutdown."""
