"""What all services share: tensors as bytes, errors as status codes, servers that start, drain and stop alike."""
