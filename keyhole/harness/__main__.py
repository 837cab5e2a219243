"""The harness's own command, with `keyhole` among its models:

python -m keyhole.harness --model keyhole --model_args pretrained=out,gpu_memory=8GiB --tasks hellaswag
"""

import sys

from keyhole.errors import UserError
from keyhole.harness.run import require

if __name__ == "__main__":
    try:
        require()
    except UserError as error:
        print(f"keyhole: {error}", file=sys.stderr)
        sys.exit(2)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
