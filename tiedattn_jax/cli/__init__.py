"""The command `tiedattn`.

main           the command: options, a subcommand, its report; `--check`
options        options, reports, progress bars: what all subcommands share
theory         `transition`, `solve`, `diagram`
simulations    `gamp`, `train`, `histogram`
"""
