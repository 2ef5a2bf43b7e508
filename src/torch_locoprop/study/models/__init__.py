"""The autoencoders of the study, by name or by their widths."""
