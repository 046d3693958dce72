"""The web console: one page that shows what an operator may know of a coordinator's runs, and changes nothing."""
