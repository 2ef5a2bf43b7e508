"""The paper's figures and more, from runs: `catalog` says what is drawn, `make` makes it."""
