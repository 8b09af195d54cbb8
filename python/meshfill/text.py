"""Text to token ids, by the tokenizer of a Hugging Face model folder. Needs the extra `tokenizers`."""

import os
import pathlib
from typing import List, Union


class TextTokenizer:
    """Reads tokenizer.json of a model folder.

    ImportError: the package `tokenizers` is missing. ValueError: the folder has no tokenizer.json that it can read.
    """

    def __init__(self, folder: Union[str, "os.PathLike[str]"]):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("prompts of text need tokenizers: pip install 'meshfill[tokenizers]'") from None
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give the model's folder, with its tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises Exception itself.
            raise ValueError(f"{path}: {error}") from None

    def encode(self, text: str) -> List[int]:
        """The ids, with the special tokens that the model's template puts around a text."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: List[int]) -> str:
        return self._tokenizer.decode(ids)
