/*
 * Reads tokenizer.model: see sentencepiece.h. A message is a sequence of fields: a varint of number and wire
 * type, then the value. Messages lie in each other at most twice (model, piece), so nothing recurs.
 */
#include "formats/sentencepiece.h"

#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- Protocol Buffers ------------------------------------------------------------------------- */

typedef enum wire_type {
    WIRE_VARINT = 0,
    WIRE_FIXED64 = 1,
    WIRE_BYTES = 2,
    WIRE_GROUP = 3,
    WIRE_GROUP_END = 4,
    WIRE_FIXED32 = 5
} wire_type;

/* A message, and what is read of it. */
typedef struct message {
    const char *path; /* of the file */
    const char *file; /* its first byte */
    const char *at, *end;
} message;

typedef struct field {
    const char *at; /* where it begins */
    uint64_t number;
    wire_type type;
    uint64_t value;   /* of a varint and of fixed bytes */
    const char *data; /* of WIRE_BYTES */
    size_t size;
} field;

static fsdp_status fail_at(const message *from, const char *at, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is not a model of SentencePiece: byte %zu: %s",
                     from->path, (size_t)(at - from->file), what);
}

static fsdp_status read_varint(message *from, uint64_t *value_out, fsdp_error *err)
{
    const char *begin = from->at;
    *value_out = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
        if (from->at == from->end)
            return fail_at(from, begin, "a number is cut off", err);
        uint64_t byte = (uint8_t)*from->at++;
        *value_out |= (byte & 0x7F) << shift;
        if (shift == 63 && byte > 1)
            break;
        if (byte < 0x80)
            return FSDP_OK;
    }
    return fail_at(from, begin, "a number has more than 64 bits", err);
}

static fsdp_status read_value(message *from, field *out, fsdp_error *err)
{
    size_t left;
    switch (out->type) {
    case WIRE_VARINT: return read_varint(from, &out->value, err);
    case WIRE_FIXED64: out->size = 8; break;
    case WIRE_FIXED32: out->size = 4; break;
    case WIRE_BYTES:
        FSDP_TRY(read_varint(from, &out->value, err));
        out->size = out->value < SIZE_MAX ? (size_t)out->value : SIZE_MAX;
        break;
    case WIRE_GROUP:
    case WIRE_GROUP_END: return fail_at(from, out->at, "a field is a group", err);
    default: return fail_at(from, out->at, "a field has an unknown wire type", err);
    }
    left = (size_t)(from->end - from->at);
    if (out->size > left)
        return fail_at(from, out->at, "a field is longer than what holds it", err);
    out->data = from->at;
    from->at += out->size;
    if (out->type != WIRE_BYTES)
        out->value = out->size == 4 ? fsdp_load_u32(out->data) : fsdp_load_u64(out->data);
    return FSDP_OK;
}

/* *more_out is false at the end of the message. */
static fsdp_status next_field(message *from, field *out, bool *more_out, fsdp_error *err)
{
    uint64_t head;
    *out = (field){.at = from->at};
    *more_out = from->at < from->end;
    if (!*more_out)
        return FSDP_OK;
    FSDP_TRY(read_varint(from, &head, err));
    out->number = head >> 3;
    out->type = (wire_type)(head & 7);
    if (out->number == 0 || head > UINT32_MAX)
        return fail_at(from, out->at, "a field has a number that no field may have", err);
    return read_value(from, out, err);
}

static fsdp_status need_type(const message *from, const field *of, wire_type type, const char *name,
                             fsdp_error *err)
{
    char what[100];
    if (of->type == type)
        return FSDP_OK;
    snprintf(what, sizeof what, "'%s' has the wire type %d, which is not its own", name,
             (int)of->type);
    return fail_at(from, of->at, what, err);
}

static message message_in(const message *from, const field *of)
{
    return (message){from->path, from->file, of->data, of->data + of->size};
}

/* --- pieces ----------------------------------------------------------------------------------- */

static fsdp_status check_piece(const message *from, const field *of, const fsdp_piece *piece,
                               uint64_t type, fsdp_error *err)
{
    if (piece->size == 0)
        return fail_at(from, of->at, "a piece has no text", err);
    if (!fsdp_utf8_valid(piece->text, piece->size))
        return fail_at(from, of->at, "the text of a piece is not UTF-8", err);
    if (!isfinite(piece->score))
        return fail_at(from, of->at, "the score of a piece is not finite", err);
    return type >= FSDP_PIECE_NORMAL && type <= FSDP_PIECE_BYTE
               ? FSDP_OK
               : fail_at(from, of->at, "a piece has an unknown type", err);
}

/* SentencePiece { 1: piece, 2: score, 3: type } */
static fsdp_status read_piece(const message *from, const field *of, fsdp_piece *out,
                              fsdp_error *err)
{
    message inside = message_in(from, of);
    uint64_t type = FSDP_PIECE_NORMAL;
    field part;
    *out = (fsdp_piece){.text = ""};
    for (bool more;;) {
        FSDP_TRY(next_field(&inside, &part, &more, err));
        if (!more)
            break;
        if (part.number == 1) {
            FSDP_TRY(need_type(&inside, &part, WIRE_BYTES, "piece", err));
            out->text = part.data;
            out->size = part.size;
        } else if (part.number == 2) {
            FSDP_TRY(need_type(&inside, &part, WIRE_FIXED32, "score", err));
            uint32_t bits = (uint32_t)part.value;
            memcpy(&out->score, &bits, sizeof bits);
        } else if (part.number == 3) {
            FSDP_TRY(need_type(&inside, &part, WIRE_VARINT, "type", err));
            type = part.value;
        }
    }
    FSDP_TRY(check_piece(from, of, out, type, err));
    out->type = (fsdp_piece_type)type;
    return FSDP_OK;
}

static fsdp_status add_piece(const message *from, const field *of, size_t most,
                             fsdp_sentencepiece *out, fsdp_error *err)
{
    fsdp_piece piece;
    FSDP_TRY(read_piece(from, of, &piece, err));
    if (out->count >= most)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %zu pieces", from->path, most);
    if (piece.type == FSDP_PIECE_UNKNOWN && out->unk >= 0)
        return fail_at(from, of->at, "it is the second piece of the type UNKNOWN", err);
    if (piece.type == FSDP_PIECE_UNKNOWN)
        out->unk = (int64_t)out->count;
    if (!fsdp_grow(&out->pieces, &out->capacity, out->count + 1, sizeof *out->pieces))
        return fsdp_fail_memory(err, from->path);
    out->pieces[out->count++] = piece;
    return FSDP_OK;
}

/* --- the rest of the model -------------------------------------------------------------------- */

enum { NOT_SET = -2 };

static fsdp_status take_id(const message *from, const field *of, const char *name, int64_t *id_out,
                           fsdp_error *err)
{
    FSDP_TRY(need_type(from, of, WIRE_VARINT, name, err));
    int64_t id = (int64_t)of->value;
    if (id < INT32_MIN || id > INT32_MAX)
        return fail_at(from, of->at, "the number of a piece has more than 32 bits", err);
    *id_out = id < 0 ? -1 : id;
    return FSDP_OK;
}

static fsdp_status take_flag(const message *from, const field *of, const char *name, bool *out,
                             fsdp_error *err)
{
    FSDP_TRY(need_type(from, of, WIRE_VARINT, name, err));
    *out = of->value != 0;
    return FSDP_OK;
}

/* TrainerSpec { 3: model_type, 24: treat_whitespace_as_suffix, 41: bos_id, 42: eos_id, 43: pad_id }; the
 * types of pieces say which one is unknown and which are bytes. */
static fsdp_status read_trainer(const message *from, const field *of, fsdp_sentencepiece *out,
                                fsdp_error *err)
{
    message inside = message_in(from, of);
    field part;
    for (bool more;;) {
        FSDP_TRY(next_field(&inside, &part, &more, err));
        if (!more)
            return FSDP_OK;
        if (part.number == 3) {
            FSDP_TRY(need_type(&inside, &part, WIRE_VARINT, "model_type", err));
            if (part.value < FSDP_PIECE_UNIGRAM || part.value > FSDP_PIECE_CHAR)
                return fail_at(&inside, part.at, "'model_type' is unknown", err);
            out->model = (fsdp_piece_model)part.value;
        } else if (part.number == 24)
            FSDP_TRY(
                take_flag(&inside, &part, "treat_whitespace_as_suffix", &out->ends_words, err));
        else if (part.number == 41)
            FSDP_TRY(take_id(&inside, &part, "bos_id", &out->bos, err));
        else if (part.number == 42)
            FSDP_TRY(take_id(&inside, &part, "eos_id", &out->eos, err));
        else if (part.number == 43)
            FSDP_TRY(take_id(&inside, &part, "pad_id", &out->pad, err));
    }
}

/* NormalizerSpec { 2: precompiled_charsmap, 3: add_dummy_prefix, 4: remove_extra_whitespaces,
 * 5: escape_whitespaces } */
static fsdp_status read_normalizer(const message *from, const field *of, fsdp_sentencepiece *out,
                                   fsdp_error *err)
{
    message inside = message_in(from, of);
    field part;
    for (bool more;;) {
        FSDP_TRY(next_field(&inside, &part, &more, err));
        if (!more)
            return FSDP_OK;
        if (part.number == 2) {
            FSDP_TRY(need_type(&inside, &part, WIRE_BYTES, "precompiled_charsmap", err));
            out->charsmap = part.size > 0 ? part.data : NULL;
            out->charsmap_size = part.size;
        } else if (part.number == 3) {
            FSDP_TRY(take_flag(&inside, &part, "add_dummy_prefix", &out->adds_space, err));
        } else if (part.number == 4) {
            FSDP_TRY(
                take_flag(&inside, &part, "remove_extra_whitespaces", &out->merges_spaces, err));
        } else if (part.number == 5) {
            FSDP_TRY(take_flag(&inside, &part, "escape_whitespaces", &out->keeps_spaces, err));
            out->keeps_spaces = !out->keeps_spaces;
        }
    }
}

/* `usual` is the number in files that name none. SentencePiece takes only control pieces for such a role. */
static fsdp_status settle_id(const message *from, const fsdp_sentencepiece *model, const char *name,
                             int64_t usual, int64_t *id, fsdp_error *err)
{
    bool is_set = *id != NOT_SET;
    if (!is_set)
        *id = usual;
    if (*id >= (int64_t)model->count && is_set)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is not a model of SentencePiece: '%s' is %lld, and there are %zu pieces",
            from->path, name, (long long)*id, model->count);
    if (*id >= (int64_t)model->count || (*id >= 0 && model->pieces[*id].type != FSDP_PIECE_CONTROL))
        *id = -1;
    return FSDP_OK;
}

/* ModelProto { 1: pieces, 2: trainer_spec, 3: normalizer_spec } */
static fsdp_status read_model(message *from, size_t most, fsdp_sentencepiece *out, fsdp_error *err)
{
    field part;
    for (bool more;;) {
        FSDP_TRY(next_field(from, &part, &more, err));
        if (!more)
            return FSDP_OK;
        if (part.number > 3)
            continue;
        FSDP_TRY(need_type(from, &part, WIRE_BYTES, "a part of the model", err));
        if (part.number == 1)
            FSDP_TRY(add_piece(from, &part, most, out, err));
        else if (part.number == 2)
            FSDP_TRY(read_trainer(from, &part, out, err));
        else
            FSDP_TRY(read_normalizer(from, &part, out, err));
    }
}

fsdp_status fsdp_sentencepiece_read(const char *data, size_t size, const char *path, size_t most,
                                    fsdp_sentencepiece *out, fsdp_error *err)
{
    message from = {path, data, data, data + size};
    *out = (fsdp_sentencepiece){.model = FSDP_PIECE_UNIGRAM,
                                .unk = -1,
                                .bos = NOT_SET,
                                .eos = NOT_SET,
                                .pad = NOT_SET,
                                .adds_space = true,
                                .merges_spaces = true};
    FSDP_TRY(read_model(&from, most, out, err));
    if (out->unk < 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is not a model of SentencePiece: it has %zu pieces, but no piece "
                         "has the type UNKNOWN",
                         path, out->count);
    FSDP_TRY(settle_id(&from, out, "bos_id", 1, &out->bos, err));
    FSDP_TRY(settle_id(&from, out, "eos_id", 2, &out->eos, err));
    return settle_id(&from, out, "pad_id", -1, &out->pad, err);
}

void fsdp_sentencepiece_release(fsdp_sentencepiece *model)
{
    fsdp_free(model->pieces);
    *model = (fsdp_sentencepiece){.pieces = NULL};
}

/* --- tiktoken --------------------------------------------------------------------------------- */

static size_t count_of(const char *at, const char *end, const char *set)
{
    const char *begin = at;
    while (at < end && *at && strchr(set, *at))
        at++;
    return (size_t)(at - begin);
}

bool fsdp_sentencepiece_is_tiktoken(const char *data, size_t size)
{
    static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *end = data + size, *at = data;
    size_t letters = count_of(at, end, base64);
    letters += count_of(at + letters, end, "=");
    at += letters;
    if (letters == 0 || letters % 4 != 0 || at == end || *at++ != ' ')
        return false;
    size_t digits = count_of(at, end, "0123456789");
    at += digits;
    return digits > 0 && (at == end || *at == '\n' || *at == '\r');
}
