"""Privacy guarantees of messages, the accountants that compute their cost, and the proofs they rest on."""
