/*
 * The FSDP1 face: makes the tree of modules from names of parameters, and chooses units by a policy. As in
 * PyTorch, children come first, and parameters of an inner unit no longer count in the outer one.
 */
#include "runtime/wrap/wrap_internal.h"

#include <string.h>

#include "base/core/mem.h"
#include "runtime/param/nearest_name.h"

enum { NONE = 0, MOST_DEPTH = 256, MIN_ELEMENTS = 100000000 };

/* Links are numbers of nodes; the root is 0, so 0 means none. */
typedef struct tree_node {
    char *name;
    size_t child, last_child, next;
    int64_t direct; /* elements of its own parameters that are not ignored */
    int64_t below;  /* of its own parameters and those below it */
} tree_node;

typedef struct module_tree {
    tree_node *nodes;
    size_t count, room;
    const fsdp_wrap_opts *opts;
    fsdp_wrap_wishes *wishes;
} module_tree;

/* --- building --------------------------------------------------------------------------------- */

static fsdp_status add_node(module_tree *tree, const char *name, size_t size, fsdp_error *err)
{
    if (!fsdp_grow(&tree->nodes, &tree->room, tree->count + 1, sizeof *tree->nodes))
        return fsdp_fail_memory(err, "the modules of a model");
    char *copy = fsdp_strndup(name, size);
    if (!copy)
        return fsdp_fail_memory(err, "the modules of a model");
    tree->nodes[tree->count++] = (tree_node){.name = copy};
    return FSDP_OK;
}

static bool is_named(const tree_node *node, const char *name, size_t size)
{
    return strlen(node->name) == size && memcmp(node->name, name, size) == 0;
}

/* Finds or makes the child named by the first `size` bytes of a name. Names come module by module, so it is
 * usually the last child. */
static fsdp_status find_child(module_tree *tree, size_t parent, const char *name, size_t size,
                              size_t *child_out, fsdp_error *err)
{
    size_t at = tree->nodes[parent].last_child;
    if (at == NONE || !is_named(&tree->nodes[at], name, size))
        for (at = tree->nodes[parent].child; at != NONE; at = tree->nodes[at].next)
            if (is_named(&tree->nodes[at], name, size))
                break;
    *child_out = at;
    if (at != NONE)
        return FSDP_OK;
    FSDP_TRY(add_node(tree, name, size, err));
    *child_out = tree->count - 1;
    tree_node *node = &tree->nodes[parent];
    if (node->last_child == NONE)
        node->child = *child_out;
    else
        tree->nodes[node->last_child].next = *child_out;
    node->last_child = *child_out;
    return FSDP_OK;
}

static fsdp_status add_param(module_tree *tree, const fsdp_param *param, bool is_ignored,
                             fsdp_error *err)
{
    size_t at = 0;
    int depth = 0;
    for (const char *dot = strchr(param->name, '.'); dot; dot = strchr(dot + 1, '.')) {
        if (++depth > MOST_DEPTH)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' lies more than %d modules deep",
                             param->name, MOST_DEPTH);
        FSDP_TRY(find_child(tree, at, param->name, (size_t)(dot - param->name), &at, err));
        if (!is_ignored)
            tree->nodes[at].below += fsdp_wrap_count(param);
    }
    if (!is_ignored)
        tree->nodes[at].direct += fsdp_wrap_count(param);
    return FSDP_OK;
}

static fsdp_status build(module_tree *tree, const fsdp_model *model, const bool *ignored,
                         fsdp_error *err)
{
    FSDP_TRY(add_node(tree, "", 0, err));
    for (size_t i = 0; i < model->count; i++)
        if (!model->params[i]->is_buffer)
            FSDP_TRY(add_param(tree, model->params[i], ignored[i], err));
    return FSDP_OK;
}

static void release(module_tree *tree)
{
    for (size_t i = 0; i < tree->count; i++)
        fsdp_free(tree->nodes[i].name);
    fsdp_free(tree->nodes);
}

/* --- modules ---------------------------------------------------------------------------------- */

static const char *last_name(const tree_node *node)
{
    const char *dot = strrchr(node->name, '.');
    return dot ? dot + 1 : node->name;
}

static bool is_list(const module_tree *tree, const tree_node *node)
{
    if (node->direct > 0 || node->child == NONE)
        return false;
    for (size_t at = node->child; at != NONE; at = tree->nodes[at].next) {
        const char *name = last_name(&tree->nodes[at]);
        if (strspn(name, "0123456789") != strlen(name))
            return false;
    }
    return true;
}

static const char *type_of(const module_tree *tree, const char *name)
{
    const fsdp_wrap_policy *policy = &tree->opts->policy;
    const char *type = policy->type_of ? policy->type_of(policy->context, name) : NULL;
    return type ? type : "";
}

static bool is_among(const char *text, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(text, list[i]) == 0)
            return true;
    return false;
}

/* '*' stands for one element of a name. */
static bool matches(const char *name, const char *pattern)
{
    while (*pattern) {
        size_t size = strcspn(name, "."), wanted = strcspn(pattern, ".");
        bool is_star = wanted == 1 && *pattern == '*';
        if (!is_star && (size != wanted || memcmp(name, pattern, size) != 0))
            return false;
        name += size;
        pattern += wanted;
        if (*name != *pattern)
            return false;
        name += *name == '.';
        pattern += *pattern == '.';
    }
    return *name == '\0';
}

static bool matches_any(const char *name, const fsdp_wrap_policy *policy)
{
    for (size_t i = 0; i < policy->name_count; i++)
        if (matches(name, policy->names[i]))
            return true;
    return false;
}

/* --- ignored parameters ----------------------------------------------------------------------- */

/* *is_wrapped_out is true when the parameter is in a module below `outer` that NAMES wraps. */
static fsdp_status is_wrapped_below(const fsdp_param *param, const char *outer,
                                    const fsdp_wrap_policy *policy, bool *is_wrapped_out,
                                    fsdp_error *err)
{
    char *name = fsdp_strndup(param->name, strlen(param->name));
    if (!name)
        return fsdp_fail_memory(err, "the modules of a model");
    *is_wrapped_out = false;
    for (char *dot = strrchr(name, '.'); dot && !*is_wrapped_out; dot = strrchr(name, '.')) {
        *dot = '\0';
        if (strlen(name) <= strlen(outer))
            break;
        *is_wrapped_out = matches_any(name, policy);
    }
    fsdp_free(name);
    return FSDP_OK;
}

static fsdp_status is_ignored(const fsdp_param *param, const fsdp_wrap_opts *opts,
                              bool *ignored_out, fsdp_error *err)
{
    *ignored_out = is_among(param->name, opts->ignored_states, opts->ignored_state_count);
    for (size_t i = 0; i < opts->ignored_module_count && !*ignored_out; i++) {
        const char *module = opts->ignored_modules[i];
        bool is_wrapped = false;
        if (!fsdp_name_is_below(param->name, module))
            continue;
        if (opts->policy.kind == FSDP_POLICY_NAMES)
            FSDP_TRY(is_wrapped_below(param, module, &opts->policy, &is_wrapped, err));
        *ignored_out = !is_wrapped;
    }
    return FSDP_OK;
}

static fsdp_status refuse(const char *what, const fsdp_nearest_name *nearest, fsdp_error *err)
{
    if (nearest->name[0] == '\0')
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no %s '%s'", what, nearest->wanted);
    return fsdp_fail(err, FSDP_ERR_USAGE, "there is no %s '%s', the nearest one is '%s'", what,
                     nearest->wanted, nearest->name);
}

static fsdp_status check_ignored_state(const fsdp_model *model, const char *name, fsdp_error *err)
{
    fsdp_nearest_name nearest = {.wanted = name};
    if (fsdp_model_find(model, name))
        return FSDP_OK;
    for (size_t i = 0; i < model->count; i++)
        fsdp_nearest_name_offer_param(&nearest, model->params[i]);
    return refuse("parameter to be ignored", &nearest, err);
}

/* A module may hold only buffers or aliases. */
static fsdp_status check_ignored_module(const fsdp_model *model, const char *module,
                                        fsdp_error *err)
{
    fsdp_nearest_name nearest = {.wanted = module};
    for (size_t i = 0; i < model->count; i++) {
        if (fsdp_param_is_below(model->params[i], module))
            return FSDP_OK;
        fsdp_nearest_name_offer_modules(&nearest, model->params[i]);
    }
    return refuse("module to be ignored", &nearest, err);
}

fsdp_status fsdp_wrap_list_ignored(const fsdp_model *model, const fsdp_wrap_opts *opts,
                                   bool *ignored_out, fsdp_error *err)
{
    if (opts->ignored_module_count > 0 && opts->ignored_state_count > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "ignored_modules and ignored_states cannot both be given");
    for (size_t i = 0; i < opts->ignored_state_count; i++)
        FSDP_TRY(check_ignored_state(model, opts->ignored_states[i], err));
    for (size_t i = 0; i < opts->ignored_module_count; i++)
        FSDP_TRY(check_ignored_module(model, opts->ignored_modules[i], err));
    for (size_t i = 0; i < model->count; i++)
        FSDP_TRY(is_ignored(model->params[i], opts, &ignored_out[i], err));
    return FSDP_OK;
}

/* --- choosing units --------------------------------------------------------------------------- */

static int64_t min_elements(const fsdp_wrap_policy *policy)
{
    return policy->min_elements > 0 ? policy->min_elements : MIN_ELEMENTS;
}

/* True when the policy is also called for the modules inside. */
static bool is_searched(const module_tree *tree, const fsdp_wrap_module *module)
{
    const fsdp_wrap_policy *policy = &tree->opts->policy;
    bool is_piece = is_among(module->type, policy->names, policy->name_count);
    if (policy->kind != FSDP_POLICY_SIZE)
        return true;
    return module->unwrapped >= min_elements(policy) && !is_piece;
}

static bool is_full_precision(const module_tree *tree, const fsdp_wrap_module *module)
{
    const fsdp_wrap_policy *policy = &tree->opts->policy;
    return is_among(module->type, policy->full_precision_types, policy->full_precision_count);
}

static bool is_wanted(const module_tree *tree, const fsdp_wrap_module *module,
                      fsdp_wrap_unit_opts *opts)
{
    const fsdp_wrap_policy *policy = &tree->opts->policy;
    if (is_full_precision(tree, module)) {
        opts->param_dtype = opts->reduce_dtype = FSDP_DTYPE_NONE;
        return true;
    }
    switch (policy->kind) {
    case FSDP_POLICY_ALWAYS: return !module->is_list;
    case FSDP_POLICY_NAMES: return matches_any(module->name, policy);
    case FSDP_POLICY_TYPES: return is_among(module->type, policy->names, policy->name_count);
    case FSDP_POLICY_SIZE: return module->unwrapped >= min_elements(policy) && !module->is_list;
    case FSDP_POLICY_CUSTOM: return policy->wants && policy->wants(policy->context, module, opts);
    default: return false;
    }
}

static fsdp_status add_wish(module_tree *tree, const char *name, const fsdp_wrap_unit_opts *opts,
                            fsdp_error *err)
{
    fsdp_wrap_wishes *wishes = tree->wishes;
    if (!fsdp_grow(&wishes->items, &wishes->room, wishes->count + 1, sizeof *wishes->items))
        return fsdp_fail_memory(err, "the units of a model");
    char *copy = fsdp_strndup(name, strlen(name));
    if (!copy)
        return fsdp_fail_memory(err, "the units of a model");
    wishes->items[wishes->count++] = (fsdp_wrap_wish){.module = copy, .opts = *opts};
    return FSDP_OK;
}

/* Wraps children first. *wrapped_out: elements at or below the module that are in units now. */
static fsdp_status wrap(module_tree *tree, size_t at, int64_t *wrapped_out, fsdp_error *err)
{
    int64_t inside = 0;
    const tree_node node = tree->nodes[at];
    const int64_t all = node.below;
    fsdp_wrap_module module = {.name = node.name,
                               .type = type_of(tree, node.name),
                               .unwrapped = all,
                               .is_list = is_list(tree, &node)};
    *wrapped_out = 0;
    if (all == 0 || !is_searched(tree, &module))
        return FSDP_OK;
    for (size_t child = node.child; child != NONE; child = tree->nodes[child].next) {
        int64_t wrapped;
        FSDP_TRY(wrap(tree, child, &wrapped, err));
        inside += wrapped;
    }
    fsdp_wrap_unit_opts opts = tree->opts->unit;
    module.unwrapped = all - inside;
    if (!is_wanted(tree, &module, &opts)) {
        *wrapped_out = inside;
        return FSDP_OK;
    }
    *wrapped_out = all;
    return add_wish(tree, node.name, &opts, err);
}

static fsdp_status wrap_all(module_tree *tree, fsdp_error *err)
{
    for (size_t at = tree->nodes[0].child; at != NONE; at = tree->nodes[at].next) {
        int64_t wrapped;
        FSDP_TRY(wrap(tree, at, &wrapped, err));
    }
    return FSDP_OK;
}

/* --- unknown names ---------------------------------------------------------------------------- */

/* A name must match a module other than the root, which no policy chooses. */
static fsdp_status check_name(const module_tree *tree, const char *pattern, fsdp_error *err)
{
    fsdp_nearest_name nearest = {.wanted = pattern};
    for (size_t at = 1; at < tree->count; at++) {
        const char *name = tree->nodes[at].name;
        if (matches(name, pattern))
            return FSDP_OK;
        fsdp_nearest_name_offer(&nearest, name, strlen(name));
    }
    return refuse("module to be wrapped that is called", &nearest, err);
}

static fsdp_status check_type(const module_tree *tree, const char *type, fsdp_error *err)
{
    fsdp_nearest_name nearest = {.wanted = type};
    for (size_t at = 1; at < tree->count; at++) {
        const char *found = type_of(tree, tree->nodes[at].name);
        if (strcmp(found, type) == 0)
            return FSDP_OK;
        fsdp_nearest_name_offer(&nearest, found, strlen(found));
    }
    return refuse("module to be wrapped of type", &nearest, err);
}

/* Checks names and types, because modules with a mistyped name would silently stay with the root. Types that
 * are exceptions (of SIZE, full_precision_types) may match no module: one list may serve many models. */
static fsdp_status check_policy(const module_tree *tree, fsdp_error *err)
{
    const fsdp_wrap_policy *policy = &tree->opts->policy;
    for (size_t i = 0; policy->kind == FSDP_POLICY_NAMES && i < policy->name_count; i++)
        FSDP_TRY(check_name(tree, policy->names[i], err));
    for (size_t i = 0; policy->kind == FSDP_POLICY_TYPES && i < policy->name_count; i++)
        FSDP_TRY(check_type(tree, policy->names[i], err));
    return FSDP_OK;
}

fsdp_status fsdp_wrap_choose(const fsdp_model *model, const fsdp_wrap_opts *opts,
                             const bool *ignored, fsdp_wrap_wishes *wishes_out, fsdp_error *err)
{
    module_tree tree = {.opts = opts, .wishes = wishes_out};
    fsdp_status status = build(&tree, model, ignored, err);
    if (status == FSDP_OK)
        status = check_policy(&tree, err);
    if (status == FSDP_OK)
        status = wrap_all(&tree, err);
    release(&tree);
    return status;
}

void fsdp_wrap_wishes_release(fsdp_wrap_wishes *wishes)
{
    for (size_t i = 0; i < wishes->count; i++)
        fsdp_free(wishes->items[i].module);
    fsdp_free(wishes->items);
    *wishes = (fsdp_wrap_wishes){0};
}
