/*
 * Names in code page 437: Python's zipfile, and with it NumPy, reads a name so when bit 11 of its flags
 * is not set. zip.c calls this file for npz.
 */
#ifndef FSDP_ZIP_NAMES_H
#define FSDP_ZIP_NAMES_H

#include "base/text.h"

bool fsdp_zip_name_is_ascii(const char *name, size_t size);

/* Adds the UTF-8 form of a name in code page 437 to out. */
void fsdp_zip_name_decode(fsdp_text *out, const char *name, size_t size);

#endif
