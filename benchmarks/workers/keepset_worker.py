"""Measures keepset, and plain transformers of the same environment as its full cache."""

import kv_bytes
from measure import Setting, Side, Start
from serve import serve

import keepset
from keepset.core.statistics import Statistics
from keepset.lab.embedded import embedded_folder


class Keepset(Side):
    def start(self, setting: Setting) -> Start:
        model = self.model_for(setting.method)
        return Start(model, keepset.Cache(model, recipe(setting.method, setting.keep)))


def recipe(method: str, keep: float) -> str:
    """Return a method's text with a budget: `snapkv` becomes `snapkv(keep=0.5)`."""
    opened = f"{method[:-1]}, " if method.endswith(")") else f"{method}("
    return f"{opened}keep={keep})"


if __name__ == "__main__":
    embedded_folder()  # offers its statistics to recipes that name none
    kv_bytes.OUTSIDE.append(Statistics)
    serve(Keepset, ("keepset", "transformers", "torch"))
