"""The command line: one module per command; this one only joins them."""

from __future__ import annotations

import click

from kernelmill.agents.cli.bundle import bundle
from kernelmill.agents.cli.doctor import doctor
from kernelmill.agents.cli.errors import OneLineGroup
from kernelmill.agents.cli.evidence import evidence
from kernelmill.agents.cli.generate import generate
from kernelmill.agents.cli.jobs import jobs
from kernelmill.agents.cli.pulls import pulls
from kernelmill.agents.cli.specs import specs
from kernelmill.agents.cli.verify import verify

EXAMPLES = """
\b
Examples:
  kernelmill doctor                        check this machine
  kernelmill specs list                    what can be built
  kernelmill generate attn_res             run a job; ends with a pull request
  kernelmill jobs resume                   go on after an interruption
  kernelmill pulls show                    review what it made
  kernelmill verify my.py --spec attn_res  check a candidate of your own

\b
Exit status: 0 done or accepted, 1 rejected or nothing gained, 2 usage,
3 the machine or we could not do it, 4 paused by budget, 130 interrupted.
"""


@click.group(
    "kernelmill",
    cls=OneLineGroup,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="kernelmill")
def main() -> None:
    """A mill for verified CuTe DSL decode kernels: specs in, reviewed pull requests out."""


for command in (bundle, doctor, evidence, generate, jobs, pulls, specs, verify):
    main.add_command(command)
