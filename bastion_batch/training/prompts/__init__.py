"""Prompts made for this project: what drafters are trained on, and what they are judged on."""

from bastion_batch.training.prompts.grammar import Grammar, Prompt

__all__ = ["Grammar", "Prompt"]
