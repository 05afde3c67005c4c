/* The names of tied tensors, by their ends and by the class of the model: see tied_names.h. */
#include "statedict/derive/tied_names.h"

#include "base/text.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/tied_classes.h"

#include <string.h>

/* --- embeddings and heads --------------------------------------------------------------------- */

/* True when `end` is the name or its last elements. */
static bool ends_in(const char *name, size_t size, const char *end)
{
    size_t n = strlen(end);
    return fsdp_bytes_end(name, size, end) && (size == n || name[size - n - 1] == '.');
}

static bool ends_in_one(const char *name, size_t size, const char *const *ends)
{
    for (; *ends; ends++)
        if (ends_in(name, size, *ends))
            return true;
    return false;
}

bool fsdp_name_is_vocabulary(const char *name, size_t size)
{
    static const char *const ends[] = {"embed_tokens.weight",
                                       "wte.weight",
                                       "word_embeddings.weight",
                                       "tok_embeddings.weight",
                                       "embed_in.weight",
                                       "shared.weight",
                                       NULL};
    return ends_in_one(name, size, ends);
}

bool fsdp_name_is_embedding(const char *name, size_t size)
{
    static const char *const ends[] = {"embedding.weight", "embeddings.weight", "embed.weight",
                                       NULL};
    return fsdp_name_is_vocabulary(name, size) || ends_in_one(name, size, ends);
}

/* Only names at the top or in one module: deeper ones are outputs of layers. */
bool fsdp_name_is_head(const char *name, size_t size)
{
    static const char *const ends[] = {"lm_head.weight", "predictions.decoder.weight", NULL};
    static const char *const tops[] = {"output.weight", "embed_out.weight", NULL};
    size_t dots = 0;
    for (size_t i = 0; i < size; i++)
        dots += name[i] == '.';
    return ends_in_one(name, size, ends) || (dots <= 2 && ends_in_one(name, size, tops));
}

/* --- names that a class ties ------------------------------------------------------------------ */

static const char *next_of(const char *line)
{
    const char *end = line + strcspn(line, "\n");
    return *end ? end + 1 : end;
}

static bool begins(const char *line, const char *word)
{
    return strncmp(line, word, strlen(word)) == 0;
}

static bool begins_classes(const char *line)
{
    return begins(line, "for ") || begins(line, "tied ");
}

/* True when the line of classes has this one after its first word. */
static bool lists(const char *line, const char *class_name)
{
    const char *end = line + strcspn(line, "\n");
    for (const char *at = line + strcspn(line, " \n"); at < end; at += strcspn(at, " \n"))
        if (strcspn(++at, " \n") == strlen(class_name) &&
            memcmp(at, class_name, strlen(class_name)) == 0)
            return true;
    return false;
}

/* The first line of the class's names; NULL: it has none. */
static const char *find_names(const fsdp_tied_model *model)
{
    const char *line = tied_classes;
    while (*line && !(begins_classes(line) && lists(line, model->class_name)))
        line = next_of(line);
    if (!*line || model->says == 0 || (model->says < 0 && !begins(line, "tied ")))
        return NULL;
    while (begins_classes(line))
        line = next_of(line);
    return line;
}

bool fsdp_tied_pair_at(const fsdp_tied_model *model, size_t number, fsdp_tied_pair *pair_out)
{
    const char *line = find_names(model);
    while (line && number > 0 && *line && !begins_classes(line)) {
        line = next_of(line);
        number--;
    }
    if (!line || !*line || begins_classes(line))
        return false;
    pair_out->name = line;
    pair_out->name_size = strcspn(line, " ");
    pair_out->other = line + pair_out->name_size + 1;
    pair_out->other_size = strcspn(pair_out->other, "\n");
    return true;
}

/* --- adding ---------------------------------------------------------------------------------------- */

static bool holds(const fsdp_sd *sd, fsdp_derived_name name, fsdp_entry_kind kind)
{
    int64_t at = fsdp_sd_find(sd, name.text, name.size);
    return at >= 0 && fsdp_sd_at(sd, (size_t)at)->kind == kind;
}

/* A name that is not there, of a pair whose other one is a tensor. */
static bool find_lacking(const fsdp_sd *sd, const fsdp_tied_pair *pair, fsdp_derived_name *lacking,
                         fsdp_derived_name *there)
{
    const fsdp_derived_name name = {pair->name, pair->name_size};
    const fsdp_derived_name other = {pair->other, pair->other_size};
    *there = fsdp_sd_find(sd, name.text, name.size) >= 0 ? name : other;
    *lacking = there->text == name.text ? other : name;
    return fsdp_sd_find(sd, lacking->text, lacking->size) < 0 &&
           (holds(sd, *there, FSDP_ENTRY_TENSOR) || holds(sd, *there, FSDP_ENTRY_ALIAS));
}

static bool lacks_names(const fsdp_tied_model *model, const fsdp_sd *sd)
{
    fsdp_derived_name lacking, there;
    fsdp_tied_pair pair;
    for (size_t i = 0; fsdp_tied_pair_at(model, i, &pair); i++)
        if (find_lacking(sd, &pair, &lacking, &there))
            return true;
    return false;
}

/* A name that was added may be the tensor of another pair. */
static fsdp_status add_all(const fsdp_tied_model *model, fsdp_derivation *derivation,
                           fsdp_name_list *added, fsdp_error *err)
{
    const fsdp_sd *sd = fsdp_derivation_sd(derivation);
    fsdp_derived_name lacking, there;
    fsdp_tied_pair pair;
    for (size_t before = SIZE_MAX; before != added->count;) {
        before = added->count;
        for (size_t i = 0; fsdp_tied_pair_at(model, i, &pair); i++) {
            if (!find_lacking(sd, &pair, &lacking, &there))
                continue;
            FSDP_TRY(fsdp_derivation_add_alias(derivation, lacking, there, err));
            if (!fsdp_names_add(added, lacking.text, lacking.size))
                return fsdp_fail_memory(err, "tied weights");
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_add_tied_names(const fsdp_tied_model *model, fsdp_checkpoint **checkpoint,
                                fsdp_name_list *added, fsdp_error *err)
{
    fsdp_checkpoint *base = *checkpoint;
    fsdp_derivation *derivation = NULL;
    if (!lacks_names(model, base->manifest.sd))
        return FSDP_OK;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(base->manifest.sd) && st == FSDP_OK; i++)
        st = fsdp_derivation_keep(derivation, i, err);
    if (st == FSDP_OK)
        st = add_all(model, derivation, added, err);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}
