"""Which encoding a text file is in, guessed from a bounded sample.

UTF-8 comes first. Another encoding is believed only on evidence: a wrong guess silently changes names, whereas "these bytes are not
UTF-8, on line 12" is repaired by saying the encoding.
"""

from __future__ import annotations

import codecs
import re

from rowmill.errors import InputError

SAMPLE_BYTES = 1024 * 1024
_EVIDENCE_BYTES = 64 * 1024
_LEAST_EVIDENCE = 8
"""Bytes outside ASCII that a guess needs, unless the text reads as plain Western European."""

_MARKS = [
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is how this one begins
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_WESTERN_LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüŒœŠšŽžŸ"
_WESTERN_SIGNS = "€‚„…‘’“”•–—™¡£§©ª«®°±²º»¿·´\u00a0"  # noqa: RUF001 - these very characters are meant
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_LINE_WITH_EVIDENCE = re.compile(rb"[^\n]*[\x80-\xff][^\n]*\n?")
_FOREIGN_RUN = re.compile(f"[{_WESTERN_LETTERS}]{{3}}")


def known_encoding(name: str) -> str:
    """`name` if Python can decode text with it, else `InputError`."""
    try:
        b"a".decode(name, "ignore")  # decoding nothing looks nothing up
    except LookupError:
        raise InputError(f"unknown encoding {name!r}; for example: utf-8, cp1252, utf-16, shift_jis") from None
    return name


def detect_encoding(sample: bytes, *, complete: bool) -> str:
    """The encoding of the file that `sample` is the start of; `complete`: it is the whole file."""
    for mark, encoding in _MARKS:
        if sample.startswith(mark):
            return encoding
    if wide := _wide_encoding(sample):
        return wide
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(sample, final=complete)
    except UnicodeDecodeError:
        return _legacy_encoding(sample)
    return "utf-8"


def _wide_encoding(sample: bytes) -> str | None:
    """UTF-16 without its mark: in mostly Latin text, every second byte is NUL."""
    pairs = len(sample) // 2
    if pairs < 2:
        return None
    if sample[1::2].count(0) > pairs * 0.6 and not sample[::2].count(0):
        return "utf-16-le"
    if sample[::2].count(0) > pairs * 0.6 and not sample[1::2].count(0):
        return "utf-16-be"
    return None


def _legacy_encoding(sample: bytes) -> str:
    """For a sample that is not UTF-8: what it is, or "utf-8" where it cannot be known, so that its bytes are reported and not guessed."""
    lenient = sample.decode("utf-8", errors="replace")
    invalid = lenient.count("\ufffd")
    if sum(character > "\x7f" for character in lenient) - invalid > invalid:
        return "utf-8"  # mostly well-formed: damaged, not foreign
    if _reads_as_western(sample):
        return "cp1252"
    evidence = b"".join(_LINE_WITH_EVIDENCE.findall(sample))[:_EVIDENCE_BYTES]
    if len(_NOT_ASCII.findall(evidence)) < _LEAST_EVIDENCE:
        return "utf-8"
    from charset_normalizer import from_bytes  # noqa: PLC0415 - rarely needed and slow to load

    best = from_bytes(evidence).best()
    return best.encoding if best is not None else "utf-8"


def _reads_as_western(sample: bytes) -> bool:
    """Whether everything outside ASCII is, read as Windows-1252, a Western letter inside a word or a usual sign.

    Statistics cannot tell Windows-1252 from its Central European neighbours in short texts ("Lefèvre" or "Lefčvre"); this can.
    """
    try:
        text = sample.decode("cp1252")
    except UnicodeDecodeError:
        return False
    foreign = {character for character in text if character > "\x7f"}
    return foreign <= set(_WESTERN_LETTERS + _WESTERN_SIGNS) and not _FOREIGN_RUN.search(text)
