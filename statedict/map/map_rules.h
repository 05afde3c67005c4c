/* The rules of a map, as map_file.c reads them, map_choice.c compares them with names, and map_apply.c
 * applies them. See map.h. */
#ifndef FSDP_MAP_RULES_H
#define FSDP_MAP_RULES_H

#include "statedict/map/map.h"

/* --- names -------------------------------------------------------------------------------------------- */

/* A piece of a pattern: a text, and then a variable. */
typedef struct map_piece {
    const char *text;
    size_t text_size;
    int variable;              /* -1: none follows */
    const char *words;         /* "weight|bias": the values of the variable; NULL: a number */
    bool is_rest;              /* the words are "*" */
} map_piece;

typedef struct map_pattern {
    const char *text;          /* as written, for messages */
    map_piece pieces[MAP_PIECES];
    int count;
} map_pattern;

/* The variables of a rule: a number, or the index of a word. -1: not set. */
typedef struct map_binding {
    int64_t values[MAP_VARIABLES];
    const char *rest;          /* of the name that was matched: the text of "{rest:*}"; NULL: none */
    size_t rest_size;
} map_binding;

/* "words NAME = WORD|WORD": what a variable of this name stands for */
typedef struct map_words {
    const char *names[MAP_NAMES], *words[MAP_NAMES];
    int count;
} map_words;

typedef struct map_variables {
    const char *names[MAP_VARIABLES];
    int count;
    const map_words *known;    /* of the map; NULL: none */
} map_variables;

bool map_pattern_matches(const map_pattern *pattern, const char *name, size_t size,
                         map_binding *binding_out);
/* --- sizes: map_size.c ------------------------------------------------------------------------------ */

#define MAP_NAME_LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_."
enum { MAP_SIZE_DIGITS = 18 };

/* "size NAME = SOURCE | SOURCE ...": the first that is known */
typedef struct map_size {
    const char *name, *sources;
    int line;
} map_size;

/* "value left NAME = EXPRESSION": a whole number among the values of a side */
typedef struct map_number {
    const char *name, *expression;
    bool is_right;
    int line;
} map_number;

/* A size, as far as it was computed. */
typedef struct map_size_value {
    enum { MAP_SIZE_NEW, MAP_SIZE_BUSY, MAP_SIZE_KNOWN, MAP_SIZE_UNKNOWN } state;
    int64_t value;
} map_size_value;

/* Numbers while a map is applied. */
typedef struct map_sizes {
    const map_size *sizes;
    size_t count;
    const fsdp_map_call *call;
    const fsdp_sd *sd;         /* whose values are numbers, too */
    map_size_value *values;    /* per size */
} map_sizes;

/* Computes an expression: + - * / % ( ) over numbers, sizes, up(A,B), which is A rounded up to a multiple
 * of B, and dim(NAME,D), which is a dim of a tensor of the checkpoint. FSDP_ERR_USAGE names what is not
 * known. */
fsdp_status map_sizes_compute(const map_sizes *sizes, const char *expression, int64_t *value_out,
                              fsdp_error *err);

/* --- rules ------------------------------------------------------------------------------------------ */

enum { MAP_COUNTED = 4, MAP_RULES = 4096 };

typedef enum map_verb {
    MAP_STACK, MAP_UNSTACK,    /* dim, variable: tensors of a number each become rows of a new dim */
    MAP_GATHER, MAP_SCATTER,   /* dim, variable, parts: they lie one after the other in the dim */
    MAP_CONCAT, MAP_SPLIT,     /* dim, sizes, or none: equal ones: the tensors of the list */
    MAP_FLATTEN, MAP_UNFLATTEN,        /* dim, sizes; "_" is what the others leave */
    MAP_PAD, MAP_UNPAD,        /* dim, size, size with padding */
    MAP_TRANSPOSE,             /* dim, dim */
    MAP_PERMUTE,               /* the dim of each dim */
    MAP_RESHAPE,               /* sizes : sizes */
    MAP_SCALE,
    MAP_ADD,
    MAP_EXP, MAP_LOG,
    MAP_FIRST,                 /* variable: its lowest number stands for all; only to the right */
    MAP_NUMBER                 /* variable, others: it counts their values together; only to the right */
} map_verb;

typedef struct map_step {
    map_verb verb;
    int dim;
    int variable;
    int counted[MAP_COUNTED];  /* of a number: the variables that it counts together; of a first: its own */
    int counted_count;
    const char *sizes[MAP_NAMES];      /* expressions */
    int size_count, split_at;  /* of a reshape: where the sizes of its other side begin */
    int order[MAP_NAMES];
    int order_count;
    double factor;             /* of a scale; of an add: the number */
    int only;                  /* the step is for the tensor of this place in the list; -1: for all */
} map_step;

enum { MAP_TO_RIGHT = 1, MAP_TO_LEFT = 2 };

/* "tied left NAME": a name that a side lacks where its tensor has another name there */
typedef struct map_tied {
    const char *name;
    bool is_right;
} map_tied;

/* "numbered NAME": a number counts the names of this form, and not only those of its rule. */
typedef struct map_numbered {
    map_pattern name;
    map_variables variables;
} map_numbered;

typedef struct map_rule {
    int line;
    int directions;
    map_variables variables;
    map_pattern left[MAP_NAMES], right[MAP_NAMES];
    int left_count, right_count;       /* one side may be empty: such names are left out */
    map_step steps[MAP_STEPS];         /* from left to right */
    int step_count;
    bool has_rest;             /* one name becomes one, with the text of "{rest:*}" */
} map_rule;

struct fsdp_map {
    fsdp_arena arena;
    const char *path, *name;
    bool is_file;              /* the path is one */
    const char *layouts[2];    /* of the left and of the right side */
    const char *types;         /* "llama mistral" */
    map_number numbers[MAP_SIZES];     /* values of a side */
    size_t number_count;
    map_words words;
    const char *values[MAP_NAMES][2];  /* texts before the '*' of values' names, left and right */
    size_t value_count;
    map_numbered numbered[MAP_NAMES];
    size_t numbered_count;
    map_tied tied[MAP_NAMES];
    size_t tied_count;
    bool keeps_others;         /* tensors that no rule takes stay as they are */
    map_rule **rules;
    size_t rule_count, rule_room;
    map_size sizes[MAP_SIZES];
    size_t size_count;
    const char *frames[MAP_NAMES][2];  /* texts around a '*', left and right */
    size_t frame_count;
    const char *unstacked[MAP_NAMES][2];       /* beginnings of stacked names, and of those of one row */
    size_t unstacked_count;
};

#endif
