"""`python -m sottovoce_client` is the command `sottovoce`."""

from sottovoce_client.entry_point import main

main()
