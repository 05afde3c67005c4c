/*
 * Names that are no UTF-8: archives from before bit 11 of the flags hold them in code page 437, and Python's
 * zipfile, and so NumPy, reads every name without that bit so. Called by zip.c for npz.
 */
#ifndef FSDP_ZIP_NAMES_H
#define FSDP_ZIP_NAMES_H

#include "base/text.h"

bool fsdp_zip_name_is_ascii(const char *name, size_t size);

/* Adds the UTF-8 form of a name in code page 437 to out. */
void fsdp_zip_name_decode(fsdp_text *out, const char *name, size_t size);

#endif
