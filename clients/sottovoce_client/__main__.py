"""Entry point of `python -m sottovoce_client`, which is the command `sottovoce`."""

from sottovoce_client.entry_point import main

main()
