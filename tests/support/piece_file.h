/* Makes tokenizer.model files of SentencePiece, field by field, for tests of what reads them. */
#ifndef FSDP_PIECE_FILE_H
#define FSDP_PIECE_FILE_H

#include "base/text.h"
#include "formats/sentencepiece.h"

/* Append a number, or a field of a message. */
void piece_file_add_varint(fsdp_text *out, uint64_t value);
void piece_file_add_number(fsdp_text *out, unsigned field, uint64_t value);
void piece_file_add_bytes(fsdp_text *out, unsigned field, const char *data, size_t size);

/* Appends a piece. type 0: the file does not say, which means NORMAL. */
void piece_file_add_piece(fsdp_text *out, const char *text, float score, unsigned type);
/* Appends one number of the trainer's options. */
void piece_file_add_trainer(fsdp_text *out, unsigned field, uint64_t value);
/* Appends <unk>, <s> and </s>. */
void piece_file_add_specials(fsdp_text *out);
/* Appends a model with nine pieces of every type. */
void piece_file_make(fsdp_text *out);

#endif
