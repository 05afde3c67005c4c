/*
 * The child's walk over groups and links. It opens objects by address, never by name, because a
 * name could lead through a link to another file. Every hard link is listed; a group that
 * contains itself is entered once; soft links are listed, not followed; external links refuse
 * the file.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "base/core/mem.h"

#include <string.h>

enum { DEEPEST = 1000, MOST_LINKS = 10000000, LONGEST_PATH = 65535, NAME_SHOWN = 200 };

typedef struct group_link {
    const char *name;
    H5L_type_t type;
    haddr_t address;
} group_link;

/* A group on the path of the walk. */
typedef struct group_frame {
    haddr_t address;
    group_link *links;
    size_t count, room, next;
    size_t path_size; /* of the group's path */
    fsdp_arena names;
} group_frame;

typedef struct group_walk {
    fsdp_h5_child *child;
    group_frame *frames;
    size_t depth, room;
    fsdp_text path;
    size_t links; /* links seen so far */
    fsdp_error *err;
    fsdp_status status; /* status of the callback */
} group_walk;

static const char *shown(const group_walk *walk, char out[NAME_SHOWN])
{
    return fsdp_printable(walk->path.data ? walk->path.data : "", walk->path.size, out, NAME_SHOWN);
}

/* --- one group -------------------------------------------------------------------------------- */

static void set_path(group_walk *walk, size_t parent_size, const char *name)
{
    walk->path.size = parent_size;
    if (parent_size > 0)
        fsdp_text_add(&walk->path, "/", 1);
    fsdp_text_add(&walk->path, name, strlen(name));
}

static void put_soft_link(group_walk *walk, hid_t group, const char *name, size_t size)
{
    char target[4096] = "";
    if (size == 0 || size >= sizeof target ||
        H5Lget_val(group, name, target, size, H5P_DEFAULT) < 0)
        target[0] = '\0';
    set_path(walk, walk->frames[walk->depth - 1].path_size, name);
    if (walk->path.failed)
        return;
    fsdp_h5_child_put_u8(walk->child, 'S');
    fsdp_h5_child_put_string(walk->child, walk->path.data, walk->path.size);
    fsdp_h5_child_put_string(walk->child, target, strnlen(target, sizeof target));
}

static fsdp_status check_link(const group_walk *walk, const char *name, H5L_type_t type)
{
    char text[NAME_SHOWN];
    const char *printable = fsdp_printable(name, strlen(name), text, sizeof text);
    if (type != H5L_TYPE_HARD && type != H5L_TYPE_SOFT)
        return fsdp_fail(walk->err, FSDP_ERR_REFUSED, "link '%s' %s", printable,
                         type == H5L_TYPE_EXTERNAL ? "leads to another file (an external link)"
                                                   : "has a user-defined type");
    if (name[0] == '\0' || strchr(name, '/'))
        return fsdp_fail(walk->err, FSDP_ERR_DAMAGED, "link '%s' has an invalid name", printable);
    if (walk->links > MOST_LINKS)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "more than %d links are in the file",
                         MOST_LINKS);
    return FSDP_OK;
}

static herr_t take_link(hid_t group, const char *name, const H5L_info_t *info, void *context)
{
    group_walk *walk = context;
    group_frame *frame = &walk->frames[walk->depth - 1];
    walk->links++;
    walk->status = check_link(walk, name, info->type);
    if (walk->status != FSDP_OK)
        return -1;
    if (info->type == H5L_TYPE_SOFT) {
        put_soft_link(walk, group, name, info->u.val_size);
        return 0;
    }
    const char *copy = fsdp_arena_strndup(&frame->names, name, strlen(name));
    if (!copy || !fsdp_grow(&frame->links, &frame->room, frame->count + 1, sizeof *frame->links)) {
        walk->status = fsdp_fail_memory(walk->err, "the links of a group");
        return -1;
    }
    frame->links[frame->count++] =
        (group_link){.name = copy, .type = info->type, .address = info->u.address};
    return 0;
}

static void leave_group(group_walk *walk)
{
    group_frame *frame = &walk->frames[--walk->depth];
    fsdp_arena_release(&frame->names);
    fsdp_free(frame->links);
}

static bool is_inside(const group_walk *walk, haddr_t address)
{
    for (size_t i = 0; i < walk->depth; i++)
        if (walk->frames[i].address == address)
            return true;
    return false;
}

static fsdp_status enter_group(group_walk *walk, hid_t group, haddr_t address)
{
    char name[NAME_SHOWN];
    if (walk->depth >= DEEPEST)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "groups are nested more than %d deep", DEEPEST);
    if (!fsdp_grow(&walk->frames, &walk->room, walk->depth + 1, sizeof *walk->frames))
        return fsdp_fail_memory(walk->err, "nested groups");
    size_t path_size = walk->path.size;
    walk->frames[walk->depth++] = (group_frame){.address = address, .path_size = path_size};
    walk->status = FSDP_OK;
    herr_t result = H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, NULL, take_link, walk);
    walk->path.size = path_size;
    if (walk->status == FSDP_OK && result < 0)
        return fsdp_h5_child_fail(walk->err, "group '/%s'", shown(walk, name));
    return walk->status;
}

/* --- all objects ------------------------------------------------------------------------------ */

static fsdp_status visit_object(group_walk *walk, hid_t object, haddr_t address)
{
    const fsdp_h5_path path = {walk->path.data, walk->path.size};
    H5I_type_t type = H5Iget_type(object);
    if (type == H5I_DATASET)
        FSDP_TRY(fsdp_h5_child_dataset(walk->child, &path, object, address, walk->err));
    if (type == H5I_GROUP && is_inside(walk, address))
        return FSDP_OK;
    FSDP_TRY(fsdp_h5_child_attributes(walk->child, &path, object, walk->err));
    return type == H5I_GROUP ? enter_group(walk, object, address) : FSDP_OK;
}

static fsdp_status visit_link(group_walk *walk, const group_link *link, size_t parent_size)
{
    char name[NAME_SHOWN];
    set_path(walk, parent_size, link->name);
    if (walk->path.failed)
        return fsdp_fail_memory(walk->err, "a path");
    if (walk->path.size > LONGEST_PATH)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "a path has %zu bytes: '%s'", walk->path.size,
                         shown(walk, name));
    hid_t object = H5Oopen_by_addr(walk->child->file, link->address);
    if (object < 0)
        return fsdp_h5_child_fail(walk->err, "'%s'", shown(walk, name));
    fsdp_status status = visit_object(walk, object, link->address);
    H5Oclose(object);
    return status;
}

static fsdp_status walk_groups(group_walk *walk)
{
    const fsdp_h5_path root_path = {"", 0};
    H5O_info_t info;
    hid_t root = H5Gopen2(walk->child->file, "/", H5P_DEFAULT);
    if (root < 0 || H5Oget_info2(root, &info, H5O_INFO_BASIC) < 0)
        return fsdp_h5_child_fail(walk->err, "the root group");
    fsdp_status status = fsdp_h5_child_attributes(walk->child, &root_path, root, walk->err);
    if (status == FSDP_OK)
        status = enter_group(walk, root, info.addr);
    H5Gclose(root);
    while (status == FSDP_OK && walk->depth > 0) {
        group_frame *frame = &walk->frames[walk->depth - 1];
        if (frame->next == frame->count) {
            leave_group(walk);
            continue;
        }
        const group_link *link = &frame->links[frame->next++];
        status = visit_link(walk, link, frame->path_size);
    }
    return status;
}

fsdp_status fsdp_h5_child_list(fsdp_h5_child *child, fsdp_error *err)
{
    group_walk walk = {.child = child, .err = err};
    child->count = 0;
    fsdp_status status = walk_groups(&walk);
    while (walk.depth > 0)
        leave_group(&walk);
    fsdp_free(walk.frames);
    fsdp_text_release(&walk.path);
    if (status == FSDP_OK)
        fsdp_h5_child_put_u8(child, 'E');
    return status;
}
