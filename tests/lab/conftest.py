"""Fixtures of all tests of the laboratory: those of commands."""

from tests.client.conftest import _commands_built_once, _paths_of_all_pages_are_drawn, _views_drawn_once

__all__ = ["_commands_built_once", "_paths_of_all_pages_are_drawn", "_views_drawn_once"]
