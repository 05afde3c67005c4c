/* The FSDP1 face: wraps a model. See wrap.h, and wrap_internal.h for the other files. */
#include "runtime/wrap/wrap_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/param/nearest_name.h"
#include "statedict/ctl/ctl_backend.h"

#include <string.h>

/* === the tree of modules ====================================================================== */

/*
 * The FSDP1 face: makes the tree of modules from names of parameters, and chooses units by a policy. As in
 * PyTorch, children come first, and parameters of an inner unit no longer count in the outer one.
 */

/* A module that becomes a unit. */
typedef struct fsdp_wrap_wish {
    char *module;
    fsdp_wrap_unit_opts opts;
} fsdp_wrap_wish;

typedef struct fsdp_wrap_wishes {
    fsdp_wrap_wish *items; /* inner ones first; the root is not among them */
    size_t count, room;
} fsdp_wrap_wishes;

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
            tree->nodes[at].below += fsdp_shape_count(param->ndim, param->shape);
    }
    if (!is_ignored)
        tree->nodes[at].direct += fsdp_shape_count(param->ndim, param->shape);
    return FSDP_OK;
}

static fsdp_status build_tree(module_tree *tree, const fsdp_model *model, const bool *ignored,
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

/* Sets one flag per parameter of the model. */
static fsdp_status list_ignored(const fsdp_model *model, const fsdp_wrap_opts *opts,
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

/* Chooses the units by the policy; ignored parameters do not count. */
static fsdp_status choose_units(const fsdp_model *model, const fsdp_wrap_opts *opts,
                                const bool *ignored, fsdp_wrap_wishes *wishes_out, fsdp_error *err)
{
    module_tree tree = {.opts = opts, .wishes = wishes_out};
    fsdp_status status = build_tree(&tree, model, ignored, err);
    if (status == FSDP_OK)
        status = check_policy(&tree, err);
    if (status == FSDP_OK)
        status = wrap_all(&tree, err);
    release(&tree);
    return status;
}

static void release_wishes(fsdp_wrap_wishes *wishes)
{
    for (size_t i = 0; i < wishes->count; i++)
        fsdp_free(wishes->items[i].module);
    fsdp_free(wishes->items);
    *wishes = (fsdp_wrap_wishes){0};
}

/* === flat parameters ========================================================================== */

/*
 * The FSDP1 face: the parameters of a unit become one flat parameter, in PyTorch's layout.
 *
 * With use_orig_params every parameter begins at a multiple of 16 bytes (in the dtype of gathered
 * parameters), and the end is padded to a multiple of the ranks; without, there are no gaps.
 * Padding is zero. The engine cuts the 1-D tensor by its usual rule, which is FSDP1's: chunks of
 * ceil(count / ranks).
 */

enum { ALIGNMENT = 16 };

/* --- members ---------------------------------------------------------------------------------- */

static bool belongs(const fsdp_wrap_flat *flat, const fsdp_param *param, bool is_ignored)
{
    bool is_taken = param->flat || param->is_buffer || is_ignored;
    return !is_taken && fsdp_name_is_below(param->name, flat->module);
}

static fsdp_status list_views(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                              fsdp_error *err)
{
    const fsdp_model *model = wrap->model;
    flat->views = fsdp_alloc(model->count, sizeof *flat->views);
    if (!flat->views)
        return fsdp_fail_memory(err, "a flat parameter");
    for (size_t i = 0; i < model->count; i++)
        if (belongs(flat, model->params[i], ignored[i]))
            flat->views[flat->view_count++] = model->params[i];
    return FSDP_OK;
}

/* The name of its module, or "root"; also before it has a unit. */
static const char *flat_name(const fsdp_wrap_flat *flat)
{
    return flat->module[0] ? flat->module : "root";
}

static fsdp_status check_view(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                              const fsdp_param *param, fsdp_error *err)
{
    const fsdp_param *first = flat->views[0];
    if (!fsdp_dtype_describe(param->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot put '%s' into a flat parameter: its dtype is %s; ignore it, or "
                         "make it a buffer",
                         param->name, fsdp_dtype_name(param->dtype));
    if (param->dtype != first->dtype)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': '%s' is %s and '%s' is %s, and a flat parameter "
                         "has one dtype; wrap them apart",
                         flat_name(flat), first->name, fsdp_dtype_name(first->dtype), param->name,
                         fsdp_dtype_name(param->dtype));
    if (!wrap->use_orig_params && param->requires_grad != first->requires_grad)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "unit %s: of '%s' and '%s' one is frozen; wrap them apart, or set use_orig_params",
            flat_name(flat), first->name, param->name);
    if (param->place_count > 0 || param->extension || param->asked_grad_dtype != FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot put '%s' into a flat parameter: it has a placement, an extension "
                         "or a dtype of gradients of its own; ignore it",
                         param->name);
    return FSDP_OK;
}

/* --- places ----------------------------------------------------------------------------------- */

static int64_t round_up(int64_t count, int64_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* The number of elements in 16 bytes, in the dtype of gathered parameters. */
static int64_t alignment_of(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat)
{
    fsdp_dtype dtype = flat->opts.param_dtype;
    if (!wrap->use_orig_params)
        return 1;
    return ALIGNMENT /
           (int64_t)fsdp_dtype_size(dtype != FSDP_DTYPE_NONE ? dtype : flat->views[0]->dtype);
}

static fsdp_status lay_out(const fsdp_wrap *wrap, fsdp_wrap_flat *flat, int64_t ranks,
                           fsdp_error *err)
{
    int64_t alignment = alignment_of(wrap, flat), count = 0;
    for (size_t i = 0; i < flat->view_count; i++) {
        fsdp_param *param = flat->views[i];
        FSDP_TRY(check_view(wrap, flat, param, err));
        count = round_up(count, alignment);
        param->flat_at = count;
        if (fsdp_add_overflow(count, fsdp_shape_count(param->ndim, param->shape), &count) ||
            count > INT64_MAX / 64)
            return fsdp_fail(
                err, FSDP_ERR_LIMIT,
                "cannot wrap unit '%s': its flat parameter is too large; wrap its modules",
                flat_name(flat));
    }
    flat->count = wrap->use_orig_params ? round_up(count, ranks) : count;
    return FSDP_OK;
}

/* --- declaring -------------------------------------------------------------------------------- */

static bool any_requires_grad(const fsdp_wrap_flat *flat)
{
    for (size_t i = 0; i < flat->view_count; i++)
        if (flat->views[i]->requires_grad)
            return true;
    return false;
}

static fsdp_status add_to_inner(fsdp_wrap *wrap, fsdp_wrap_flat *flat, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%s%s_flat_param", flat->module, flat->module[0] ? "." : "");
    fsdp_status status = name.failed
                             ? fsdp_fail_memory(err, "a flat parameter")
                             : fsdp_model_add(wrap->inner,
                                              &(fsdp_param_spec){.name = name.data,
                                                                 .dtype = flat->views[0]->dtype,
                                                                 .ndim = 1,
                                                                 .shape = &flat->count},
                                              &flat->param, err);
    fsdp_text_release(&name);
    if (status == FSDP_OK)
        flat->param->requires_grad = any_requires_grad(flat);
    return status;
}

/* Lays out a flat parameter of all parameters below its module that have no place yet, and declares it in the
 * inner model. With use_orig_params its padded size is a multiple of ranks. */
static fsdp_status declare_flat(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                                int64_t ranks, fsdp_error *err)
{
    FSDP_TRY(list_views(wrap, flat, ignored, err));
    if (flat->view_count == 0)
        return FSDP_OK;
    FSDP_TRY(lay_out(wrap, flat, ranks, err));
    FSDP_TRY(add_to_inner(wrap, flat, err));
    for (size_t i = 0; i < flat->view_count; i++)
        flat->views[i]->flat = flat->param;
    return FSDP_OK;
}

static void release_flat(fsdp_wrap_flat *flat)
{
    fsdp_free(flat->summoned);
    fsdp_free(flat->summoned_grad);
    fsdp_free(flat->module);
    fsdp_free(flat->views);
}

/* --- queries ---------------------------------------------------------------------------------- */

fsdp_wrap_place fsdp_wrap_place_of(const fsdp_param *param)
{
    if (!param)
        return (fsdp_wrap_place){0};
    if (!param->flat || !param->flat->group)
        return (fsdp_wrap_place){0};
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    return (fsdp_wrap_place){.flat = param->flat,
                             .offset = param->flat_at,
                             .count = fsdp_shape_count(param->ndim, param->shape),
                             .first = run.first,
                             .local = run.count,
                             .at = run.at};
}

/* --- strategies ------------------------------------------------------------------------------- */

static bool is_hybrid_strategy(fsdp_wrap_strategy strategy)
{
    return strategy == FSDP_WRAP_HYBRID_SHARD || strategy == FSDP_WRAP_HYBRID_SHARD_ZERO2;
}

static bool reshards_after_forward(fsdp_wrap_strategy strategy)
{
    return strategy == FSDP_WRAP_FULL_SHARD || strategy == FSDP_WRAP_HYBRID_SHARD;
}

static fsdp_status check_strategy(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                                  fsdp_error *err)
{
    const char *name = flat_name(flat);
    int ndim = fsdp_mesh_ndim(wrap->mesh);
    if (flat->opts.strategy < FSDP_WRAP_FULL_SHARD ||
        flat->opts.strategy > FSDP_WRAP_HYBRID_SHARD_ZERO2)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot wrap unit '%s': %d is not a strategy", name,
                         (int)flat->opts.strategy);
    if (ndim > 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap the model: the mesh has %d dims; give one of one dim, or of "
                         "replicas and shards, or make units (unit.h)",
                         ndim);
    if (ndim == 1 && flat->is_hybrid)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': its strategy is hybrid and the mesh has one dim; "
                         "give a mesh of replicas and shards",
                         name);
    return FSDP_OK;
}

static fsdp_status check_unit(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat, fsdp_error *err)
{
    const fsdp_wrap_unit_opts *opts = &flat->opts;
    const char *name = flat_name(flat);
    if (opts->backward_prefetch < FSDP_WRAP_BACKWARD_PRE ||
        opts->backward_prefetch > FSDP_WRAP_BACKWARD_NONE)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': %d is not a backward_prefetch", name,
                         (int)opts->backward_prefetch);
    FSDP_TRY(fsdp_option_check_float("param_dtype", opts->param_dtype, err));
    FSDP_TRY(fsdp_option_check_float("reduce_dtype", opts->reduce_dtype, err));
    return check_strategy(wrap, flat, err);
}

/* The number of ranks that a unit's parameters are cut for. */
static int64_t shard_ranks(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat)
{
    bool is_hybrid = flat->is_hybrid;
    return is_hybrid ? fsdp_mesh_dim_size(wrap->mesh, 1) : fsdp_mesh_size(wrap->mesh);
}

static fsdp_status join_dims(const fsdp_wrap *wrap, fsdp_text *dims, fsdp_error *err)
{
    for (int i = 0; i < fsdp_mesh_ndim(wrap->mesh); i++)
        fsdp_text_addf(dims, "%s%s", i > 0 ? "," : "", fsdp_mesh_dim_name(wrap->mesh, i));
    return dims->failed ? fsdp_fail_memory(err, "a unit") : FSDP_OK;
}

static fsdp_unit_opts opts_of(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                              const char *all_dims)
{
    fsdp_unit_opts opts = {.mesh = wrap->mesh};
    fsdp_wrap_strategy strategy = flat->opts.strategy;
    bool replicates = strategy == FSDP_WRAP_NO_SHARD;
    if (!is_hybrid_strategy(strategy)) {
        opts.shard_dims = replicates ? "" : all_dims;
        opts.replicate_dims = replicates ? all_dims : "";
    }
    opts.reshard_after_forward =
        reshards_after_forward(strategy) ? FSDP_RESHARD_AUTO : FSDP_RESHARD_NEVER;
    opts.param_dtype = flat->opts.param_dtype;
    opts.reduce_dtype = flat->opts.reduce_dtype != FSDP_DTYPE_NONE ? flat->opts.reduce_dtype
                                                                   : flat->opts.param_dtype;
    opts.offload = flat->opts.offload_params;
    return opts;
}

/* --- units ------------------------------------------------------------------------------------ */

static void set_prefetch(fsdp_unit *unit, const fsdp_wrap_unit_opts *opts)
{
    static const fsdp_prefetch_time times[] = {
        [FSDP_WRAP_BACKWARD_PRE] = FSDP_PREFETCH_BEFORE,
        [FSDP_WRAP_BACKWARD_POST] = FSDP_PREFETCH_AFTER,
        [FSDP_WRAP_BACKWARD_NONE] = FSDP_PREFETCH_NEVER,
    };
    unit->backward_prefetch_time = times[opts->backward_prefetch];
    unit->prefetches_next = opts->forward_prefetch;
}

static fsdp_status make_unit(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                             fsdp_error *err)
{
    fsdp_text dims = {0};
    FSDP_TRY(check_unit(wrap, flat, err));
    FSDP_TRY(declare_flat(wrap, flat, ignored, shard_ranks(wrap, flat), err));
    fsdp_status status = join_dims(wrap, &dims, err);
    const fsdp_unit_opts opts = opts_of(wrap, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_unit_create(wrap->inner, flat->module, &opts, &flat->unit, err);
    fsdp_text_release(&dims);
    if (status == FSDP_OK)
        set_prefetch(flat->unit, &flat->opts);
    return status;
}

static fsdp_status add_flat(fsdp_wrap *wrap, const char *module, const fsdp_wrap_unit_opts *opts,
                            fsdp_error *err)
{
    fsdp_wrap_flat *flat = &wrap->flats[wrap->flat_count];
    flat->opts = *opts;
    flat->is_hybrid = is_hybrid_strategy(opts->strategy);
    flat->module = fsdp_strndup(module, strlen(module));
    if (!flat->module)
        return fsdp_fail_memory(err, "the units of a model");
    wrap->flat_count++;
    return FSDP_OK;
}

/* Adds buffers and ignored parameters to the inner model, whole on every rank. */
static fsdp_status add_whole(fsdp_wrap *wrap, fsdp_param *param, fsdp_error *err)
{
    fsdp_dtype dtype = param->dtype;
    fsdp_param *inner;
    if (!param->is_buffer) {
        FSDP_TRY(fsdp_model_add(
            wrap->inner,
            &(fsdp_param_spec){
                .name = param->name, .dtype = dtype, .ndim = param->ndim, .shape = param->shape},
            &inner, err));
        inner->is_ignored = true;
    } else {
        bool is_cast =
            wrap->buffer_dtype != FSDP_DTYPE_NONE && fsdp_dtype_describe(dtype)->is_float;
        FSDP_TRY(fsdp_model_add(wrap->inner,
                                &(fsdp_param_spec){.name = param->name,
                                                   .dtype = is_cast ? wrap->buffer_dtype : dtype,
                                                   .ndim = param->ndim,
                                                   .shape = param->shape,
                                                   .is_buffer = true,
                                                   .is_transient = !param->is_persistent},
                                &inner, err));
    }
    inner->requires_grad = false;
    param->flat = inner;
    return FSDP_OK;
}

static fsdp_status add_wholes(fsdp_wrap *wrap, const bool *ignored, fsdp_error *err)
{
    for (size_t i = 0; i < wrap->model->count; i++) {
        fsdp_param *param = wrap->model->params[i];
        if (param->is_buffer || ignored[i])
            FSDP_TRY(add_whole(wrap, param, err));
    }
    return FSDP_OK;
}

static fsdp_status plan_units(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, const bool *ignored,
                              fsdp_error *err)
{
    fsdp_wrap_wishes wishes = {0};
    fsdp_status status = choose_units(wrap->model, opts, ignored, &wishes, err);
    if (status == FSDP_OK) {
        wrap->flats = fsdp_alloc(wishes.count + 1, sizeof *wrap->flats);
        status = wrap->flats ? FSDP_OK : fsdp_fail_memory(err, "the units of a model");
    }
    for (size_t i = 0; i < wishes.count && status == FSDP_OK; i++)
        status = add_flat(wrap, wishes.items[i].module, &wishes.items[i].opts, err);
    if (status == FSDP_OK)
        status = add_flat(wrap, "", &opts->unit, err);
    release_wishes(&wishes);
    return status;
}

static fsdp_status make_units(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, bool *ignored,
                              fsdp_error *err)
{
    FSDP_TRY(list_ignored(wrap->model, opts, ignored, err));
    FSDP_TRY(plan_units(wrap, opts, ignored, err));
    FSDP_TRY(fsdp_model_create(wrap->model->world, &wrap->inner, err));
    FSDP_TRY(add_wholes(wrap, ignored, err));
    for (size_t i = 0; i + 1 < wrap->flat_count; i++)
        FSDP_TRY(make_unit(wrap, &wrap->flats[i], ignored, err));
    fsdp_wrap_flat *root = &wrap->flats[wrap->flat_count - 1];
    FSDP_TRY(check_unit(wrap, root, err));
    return declare_flat(wrap, root, ignored, shard_ranks(wrap, root), err);
}

/* --- wrapping --------------------------------------------------------------------------------- */

/* Every rank checks its own host. */
static fsdp_status check_hosts(const fsdp_world *world, fsdp_error *err)
{
    if (fsdp_world_size(world) % fsdp_world_local_size(world) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "hosts have different numbers of ranks; give a mesh of replicas and shards");
}

/* Makes a mesh of all ranks; for hybrid strategies, of hosts x the ranks of a host. */
static fsdp_status make_mesh(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    fsdp_world *world = wrap->model->world;
    int64_t size = fsdp_world_size(world), local = fsdp_world_local_size(world);
    bool is_hybrid = is_hybrid_strategy(opts->unit.strategy);
    wrap->mesh = opts->mesh;
    if (opts->mesh)
        return FSDP_OK;
    if (is_hybrid)
        FSDP_TRY(fsdp_ctl_agree(fsdp_world_ctl(world), check_hosts(world, err), err));
    const char *const two[] = {"replicate", "shard"}, *const one[] = {"dp"};
    FSDP_TRY(fsdp_world_mesh(world, is_hybrid ? 2 : 1,
                             is_hybrid ? (int64_t[]){size / local, local} : &size,
                             is_hybrid ? two : one, &wrap->made_mesh, err));
    wrap->mesh = wrap->made_mesh;
    return FSDP_OK;
}

static fsdp_status check_model(const fsdp_model *model, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    if (model->root || model->unit_count > 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot wrap the model: it has units already; leave them to fsdp_wrap_create");
    return fsdp_option_check_float("buffer_dtype", opts->buffer_dtype, err);
}

/* The part of wrapping that can fail on one rank alone. */
static fsdp_status plan(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    bool *ignored = fsdp_alloc(wrap->model->count, sizeof *ignored);
    if (!ignored)
        return fsdp_fail_memory(err, "the units of a model");
    fsdp_status status = make_units(wrap, opts, ignored, err);
    fsdp_free(ignored);
    return status;
}

/* Copies dtypes and shards of the flat parameters to the caller's parameters. */
static void point_views(fsdp_wrap *wrap)
{
    for (size_t i = 0; i < wrap->model->count; i++) {
        fsdp_param *param = wrap->model->params[i];
        param->data_dtype = param->flat->data_dtype;
        param->grad_dtype = param->flat->grad_dtype;
        param->shard = param->flat->group ? NULL : param->flat->shard;
    }
    wrap->model->root = wrap->root;
}

static void unpoint_views(fsdp_model *model)
{
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        param->flat = NULL;
        param->flat_at = 0;
        param->shard = NULL;
        param->data_dtype = param->dtype;
        param->grad_dtype = FSDP_DTYPE_NONE;
    }
}

/* After its root, whose optimizers may be freed later than the wrap. */
static void end_wrap(void *owner)
{
    fsdp_wrap *wrap = owner;
    if (wrap->inner)
        unpoint_views(wrap->model);
    if (wrap->root)
        wrap->model->root = NULL;
    fsdp_model_free(wrap->model);
    fsdp_model_free(wrap->inner);
    for (size_t i = 0; i < wrap->flat_count; i++)
        release_flat(&wrap->flats[i]);
    fsdp_free(wrap->flats);
    fsdp_host_view_release(&wrap->summoned_grads);
    fsdp_mesh_free(wrap->made_mesh);
    fsdp_free(wrap);
}

static fsdp_status create_root(fsdp_wrap *wrap, fsdp_error *err)
{
    fsdp_wrap_flat *flat = &wrap->flats[wrap->flat_count - 1];
    fsdp_text dims = {0};
    fsdp_status status =
        fsdp_ctl_agree(fsdp_world_ctl(wrap->model->world), join_dims(wrap, &dims, err), err);
    const fsdp_unit_opts opts = opts_of(wrap, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_root_create(wrap->inner, &opts, &wrap->root, err);
    if (wrap->root) {
        wrap->root->owner = wrap;
        wrap->root->end_owner = end_wrap;
        wrap->root->declared = wrap->model;
        wrap->root->steps_runs = wrap->use_orig_params;
    }
    fsdp_text_release(&dims);
    if (status != FSDP_OK)
        return status;
    flat->unit = fsdp_root_unit(wrap->root);
    set_prefetch(flat->unit, &flat->opts);
    return FSDP_OK;
}

static fsdp_status build(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(wrap->model->world);
    FSDP_TRY(fsdp_ctl_agree(ctl, check_model(wrap->model, opts, err), err));
    FSDP_TRY(make_mesh(wrap, opts, err));
    FSDP_TRY(fsdp_ctl_agree(ctl, plan(wrap, opts, err), err));
    FSDP_TRY(create_root(wrap, err));
    wrap->root->context->limits_gathers = !opts->unlimited_gathers;
    point_views(wrap);
    return FSDP_OK;
}

static fsdp_status create(fsdp_model *model, const fsdp_wrap_opts *opts, fsdp_wrap **wrap_out,
                          fsdp_error *err)
{
    fsdp_wrap *wrap = fsdp_alloc(1, sizeof *wrap);
    if (!wrap) /* the other ranks wait for this rank's status */
        return fsdp_ctl_agree(fsdp_world_ctl(model->world),
                              fsdp_fail_memory(err, "a wrapped model"), err);
    wrap->model = fsdp_model_hold(model);
    wrap->use_orig_params = opts->use_orig_params;
    wrap->buffer_dtype = opts->buffer_dtype;
    fsdp_status status = build(wrap, opts, err);
    if (status == FSDP_OK)
        *wrap_out = wrap;
    else
        fsdp_wrap_free(wrap);
    return status;
}

fsdp_status fsdp_wrap_create(fsdp_model *model, const fsdp_wrap_opts *given, fsdp_wrap **wrap_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, model, wrap_out);
    const fsdp_wrap_opts opts = given ? *given : (fsdp_wrap_opts){0};
    fsdp_ctl *ctl = fsdp_world_ctl(model->world);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_wrap_create");
    fsdp_status status = create(model, &opts, wrap_out, err);
    fsdp_ctl_end_public(ctl, outer);
    return status;
}

void fsdp_wrap_free(fsdp_wrap *wrap)
{
    if (wrap && wrap->root)
        fsdp_root_free(wrap->root);
    else if (wrap)
        end_wrap(wrap);
}

/* --- contents --------------------------------------------------------------------------------- */

fsdp_root *fsdp_wrap_root(fsdp_wrap *wrap)
{
    if (!wrap)
        return NULL;
    return wrap->root;
}

fsdp_unit *fsdp_wrap_unit(fsdp_wrap *wrap, const char *module)
{
    if (!wrap || !module)
        return NULL;
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (strcmp(wrap->flats[i].module, module) == 0)
            return wrap->flats[i].unit;
    return NULL;
}

fsdp_param *fsdp_wrap_flat_param(fsdp_wrap *wrap, const fsdp_unit *unit)
{
    if (!wrap || !unit)
        return NULL;
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (wrap->flats[i].unit == unit)
            return wrap->flats[i].param;
    return NULL;
}

fsdp_wrap_training fsdp_wrap_training_state(const fsdp_wrap *wrap)
{
    if (!wrap)
        return FSDP_WRAP_IDLE;
    if (wrap->root->is_summoned)
        return FSDP_WRAP_SUMMON_FULL_PARAMS;
    return wrap->root->is_in_forward || wrap->root->is_in_backward ? FSDP_WRAP_FORWARD_BACKWARD
                                                                   : FSDP_WRAP_IDLE;
}

fsdp_status fsdp_wrap_check_idle(fsdp_wrap *wrap, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(wrap->root, err));
    if (fsdp_wrap_training_state(wrap) == FSDP_WRAP_FORWARD_BACKWARD)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot run %s inside a step; call it between steps",
                         what);
    if (fsdp_wrap_training_state(wrap) == FSDP_WRAP_SUMMON_FULL_PARAMS)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot run %s: full parameters are summoned; call fsdp_wrap_summon_end first", what);
    return fsdp_context_sync(wrap->root->context, err);
}

/* --- settings --------------------------------------------------------------------------------- */

/* Strategies that keep parameters from forward to backward also keep them after an accumulating backward. */
fsdp_status fsdp_wrap_set_accumulating(fsdp_wrap *wrap, bool is_accumulating, fsdp_error *err)
{
    FSDP_NEED(err, wrap);
    FSDP_TRY(fsdp_wrap_check_idle(wrap, "fsdp_wrap_set_accumulating", err));
    for (size_t i = 0; i < wrap->flat_count; i++) {
        const fsdp_wrap_flat *flat = &wrap->flats[i];
        bool keeps = is_accumulating && !reshards_after_forward(flat->opts.strategy);
        FSDP_TRY(fsdp_unit_set(flat->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, !is_accumulating,
                               false, err));
        FSDP_TRY(fsdp_unit_set(flat->unit, FSDP_UNIT_RESHARD_AFTER_BACKWARD, !keeps, false, err));
    }
    return FSDP_OK;
}
