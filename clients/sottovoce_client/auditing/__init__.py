"""`sottovoce audit`: where its runs come from, what is printed and written; and the audit of foreign services."""
