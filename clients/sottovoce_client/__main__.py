"""`python -m sottovoce_client` is the command `sottovoce`."""

from sottovoce_client.entry import main

main()
