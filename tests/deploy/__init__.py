"""The images and the compose file of `deploy` on a real Docker Engine, by `python -m tests.deploy`."""
