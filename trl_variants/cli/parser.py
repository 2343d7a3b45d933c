"""argparse with the package's manners: a mistake is a VariantError, not a usage dump."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..errors import VariantError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises VariantError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise VariantError(f"{message}; see {self.prog} -h")
