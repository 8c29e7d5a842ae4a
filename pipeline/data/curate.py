"""`private-rlhf privatize --data SRC --output DIR`: a holder of labels turns a source into a release."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.data.formats import read_preferences
from pipeline.data.release import ReleaseManifest, text_format, write_release
from pipeline.privacy.keys import load_key
from pipeline.privacy.mechanism import RandomizedResponse
from pipeline.privacy.privatize import guarantee, privatize_records


def privatize_source(data: str, output: Path, epsilon: float, key_file: Path, split: str | None = None) -> str:
    """Writes the release of `data` at `epsilon` to `output`, and returns the one line to print.

    Raises:
        UserError: ε not a finite number above 0, bad key, bad input, or an output folder that holds something else.
    """
    if Path(output).exists() and not Path(output).is_dir():
        raise UserError(f"{output}: is a file; choose another --output")
    mechanism, key = RandomizedResponse(epsilon), load_key(key_file)
    records, counts = privatize_records(read_preferences(data, split), mechanism, key, data)
    facts = guarantee(mechanism, key)
    manifest = ReleaseManifest(
        format=text_format(records[0]),
        rows=len(records),
        source=Path(data).name,
        guarantee=facts,
        dropped=counts.as_dict(),
    )
    write_release(records, output, manifest)
    dropped = ", ".join(f"{count} {name}" for name, count in counts.as_dict().items())
    return (
        f"{len(records)} labels released at ε = {epsilon:g} to {output} (each kept with probability "
        f"{mechanism.keep_prob:.4f}); dropped: {dropped}"
    )
