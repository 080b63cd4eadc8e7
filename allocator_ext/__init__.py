"""The C++ part: allocator, storages, tapes and lanes. Its interface is `_C`."""

import torch  # noqa: F401  (loads the libraries that the extension is linked with)
