"""What every room uses: configs, errors, files, figures and tables. What most modules need is imported from here."""

from npeff.utils.configs import Record, did_you_mean, from_dict, read_record, replace, to_dict, write_record
from npeff.utils.errors import UserError, first_line, out_of_memory
from npeff.utils.files import only_one, read_object, remove_partials, sha256, whole_file, write_text
from npeff.utils.text import amount, cut, duration, is_text, percent, rounded, short, shorten
from npeff.utils.types import Array
from npeff.utils.version import __version__

__all__ = ["Array", "Record", "UserError", "__version__", "amount", "cut", "did_you_mean", "duration", "first_line"]
__all__ += ["from_dict", "is_text", "only_one", "out_of_memory", "percent", "read_object", "read_record"]
__all__ += ["remove_partials", "replace", "rounded", "sha256", "short", "shorten", "to_dict", "whole_file"]
__all__ += ["write_record", "write_text"]
