/* Files and members of a plan, and the values that it makes: see universal.h. */
#include "formats/deepspeed/universal.h"

#include "base/data/name_path.h"

#include <string.h>

typedef struct universal_value {
    fsdp_value value;
    struct universal_value *next;
} universal_value;

fsdp_status universal_fail_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "a universal checkpoint");
}

fsdp_value *universal_new_value(universal_plan *plan)
{
    universal_value *made = fsdp_arena_alloc(&plan->arena, 1, sizeof *made);
    if (!made)
        return NULL;
    made->next = plan->values;
    plan->values = made;
    return &made->value;
}

fsdp_status universal_add_file(universal_plan *plan, const char *name, size_t *number_out,
                               fsdp_error *err)
{
    if (!name ||
        !fsdp_grow(&plan->files, &plan->file_room, plan->file_count + 1, sizeof *plan->files))
        return universal_fail_memory(err);
    plan->files[plan->file_count] = (universal_file){.name = name};
    *number_out = plan->file_count++;
    return FSDP_OK;
}

fsdp_status universal_add_member(universal_plan *plan, size_t number,
                                 const fsdp_target_entry *member, universal_slot *slot_out,
                                 fsdp_error *err)
{
    universal_file *file = &plan->files[number];
    if (!fsdp_grow(&file->entries, &file->room, file->count + 1, sizeof *file->entries))
        return universal_fail_memory(err);
    if (slot_out)
        *slot_out = (universal_slot){number, file->count};
    file->entries[file->count++] = *member;
    return FSDP_OK;
}

/* --- names ------------------------------------------------------------------------------------ */

universal_key universal_text_key(const char *text)
{
    return (universal_key){text, strlen(text), UNIVERSAL_KEY_TEXT};
}

fsdp_status universal_name_member(universal_plan *plan, fsdp_target_entry *member,
                                  const universal_key *keys, size_t count, fsdp_error *err)
{
    size_t size = count - 1, at = 0;
    for (size_t i = 0; i < count; i++)
        size += keys[i].size;
    char *name = fsdp_arena_alloc(&plan->arena, size + 1, 1);
    int32_t *path = fsdp_arena_alloc(&plan->arena, count, sizeof *path);
    if (!name || !path)
        return universal_fail_memory(err);
    for (size_t i = 0; i < count; i++) {
        int32_t bytes = (int32_t)keys[i].size;
        if (i > 0)
            name[at++] = '.';
        if (bytes > 0)
            memcpy(name + at, keys[i].text, keys[i].size);
        at += keys[i].size;
        path[i] = keys[i].kind == UNIVERSAL_KEY_POSITION ? -bytes
                  : keys[i].kind == UNIVERSAL_KEY_NUMBER ? bytes | FSDP_PATH_NUMBER
                                                         : bytes;
    }
    member->name = name;
    member->name_size = size;
    member->path = path;
    member->path_count = count;
    return FSDP_OK;
}

fsdp_status universal_add_named(universal_plan *plan, size_t file, fsdp_target_entry member,
                                universal_key name, universal_slot *slot_out, fsdp_error *err)
{
    FSDP_TRY(universal_name_member(plan, &member, &name, 1, err));
    return universal_add_member(plan, file, &member, slot_out, err);
}

void universal_plan_release(universal_plan *plan)
{
    for (universal_value *made = plan->values; made; made = made->next)
        fsdp_value_release(&made->value);
    for (size_t f = 0; f < plan->file_count; f++)
        fsdp_free(plan->files[f].entries);
    fsdp_free(plan->files);
    fsdp_free(plan->folders);
    fsdp_arena_release(&plan->arena);
    *plan = (universal_plan){0};
}
