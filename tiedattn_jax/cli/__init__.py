"""The subcommands of `tiedattn`, one module each: `register` adds its options, `run` does its work and reports."""
