"""The command `locoprop`: a file for each command; `main` starts them and reports errors."""
