"""What every room uses: configs, errors, files, figures and tables. What most modules need is imported from here."""

from npeff.utils.configs import Record, from_dict, read_record, replace, to_dict, write_record
from npeff.utils.errors import UserError, out_of_memory
from npeff.utils.files import only_one, read_object, remove_partials, sha256, whole_file, write_text
from npeff.utils.text import cut, duration, percent, rounded, shorten
from npeff.utils.version import __version__

__all__ = ["Record", "UserError", "__version__", "cut", "duration", "from_dict", "only_one", "out_of_memory"]
__all__ += ["percent", "read_object", "read_record", "remove_partials", "replace", "rounded", "sha256", "shorten"]
__all__ += ["to_dict", "whole_file", "write_record", "write_text"]
