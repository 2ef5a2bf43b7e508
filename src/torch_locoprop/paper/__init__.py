"""The equations of the paper, as functions and small classes on tensors."""
