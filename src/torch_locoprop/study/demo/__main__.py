"""Run the demo: ``python -m torch_locoprop.study.demo``."""

import typer

from torch_locoprop.study.demo.run import main

typer.run(main)
