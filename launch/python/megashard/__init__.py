"""Starts and follows megashard's trainings from Python (docs/python.md).

The engine is a program without Python: these functions start it and read its files. Importing this package loads
nothing but the standard library; `load_checkpoint` needs torch.
"""
from .checkpoints import load_checkpoint
from .program import MegashardError, UsageError, arguments, plan, program
from .run import Run, train

__all__ = ["MegashardError", "Run", "UsageError", "arguments", "load_checkpoint", "plan", "program", "train"]
