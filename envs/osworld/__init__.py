"""OSWorld: its task files, on virtual machines. `python -m envs.osworld --help`; docs/osworld.md."""
