"""One run of the study: its configuration, its steps, its folder; and populations of runs."""
