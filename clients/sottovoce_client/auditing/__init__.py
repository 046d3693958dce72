"""`sottovoce audit`: where its runs come from, what is printed and written, and its self-test."""
