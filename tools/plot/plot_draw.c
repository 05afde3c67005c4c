/* The picture: a legend, and four panels over the steps, whose axes have round numbers. See plot.h. */
#include "tools/cli/cli.h"
#include "tools/plot/plot.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- ticks ----------------------------------------------------------------------------------------- */

static const double LARGEST = 1e300, LEAST_PART = 1e-9;
static const int UNITS[] = {1, 2, 5};
enum { UNIT_COUNT = 3, LOWEST_EXPONENT = -300, MOST_DECIMALS = 4 };

static double power(int exponent)
{
    return pow(10, exponent);
}

/* x / (unit * 10^exponent); a division by 1e-3 has no error that a product with 0.001 has. */
static double in_units(double x, int unit, int exponent)
{
    return (exponent < 0 ? x * power(-exponent) : x / power(exponent)) / unit;
}

/* Below and above: an integer that is off by rounding alone counts as that integer. */
static double whole_below(double x)
{
    double nearest = round(x);
    return fabs(x - nearest) <= fabs(x) * LEAST_PART * 1e-3 ? nearest : floor(x);
}

static double whole_above(double x)
{
    return -whole_below(-x);
}

static double within_limits(double x)
{
    return isnan(x) ? 0 : fmin(fmax(x, -LARGEST), LARGEST);
}

static void widen(double *low, double *high)
{
    double largest = fmax(fabs(*low), fabs(*high));
    if (*high - *low > largest * LEAST_PART && *high - *low > 1 / LARGEST)
        return;
    double by = largest > 1 / LARGEST * 1e9 ? largest * 0.1 : 1;
    *low -= by;
    *high += by;
}

static plot_ticks choose(double low, double high, int most, int least_exponent)
{
    plot_ticks ticks = {.unit = 1};
    int exponent = (int)floor(log10((high - low) / most)) - 1;
    exponent = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent;
    for (exponent = exponent < least_exponent ? least_exponent : exponent;; exponent++) {
        for (int i = 0; i < UNIT_COUNT; i++) {
            double first = whole_below(in_units(low, UNITS[i], exponent));
            double last = whole_above(in_units(high, UNITS[i], exponent));
            if (last - first > most - 1)
                continue;
            ticks = (plot_ticks){first, UNITS[i], exponent, (int)(last - first) + 1};
            return ticks;
        }
    }
}

plot_ticks plot_ticks_between(double low, double high, int most)
{
    low = within_limits(low);
    high = within_limits(high);
    widen(&low, &high);
    return choose(low, high, most, LOWEST_EXPONENT);
}

plot_ticks plot_ticks_of_steps(double low, double high, int most)
{
    low = within_limits(low);
    high = within_limits(high);
    if (high - low < 1)
        high = low + 1;
    widen(&low, &high);
    return choose(low, high, most, 0);
}

double plot_tick(const plot_ticks *ticks, int i)
{
    double units = (ticks->first + i) * ticks->unit;
    return ticks->exponent < 0 ? units / power(-ticks->exponent) : units * power(ticks->exponent);
}

/* "2.50e-07" becomes "2.5e-7". */
static void tidy_exponent(char *text)
{
    char *e = strchr(text, 'e'), *digits = e ? e + 2 : NULL, *end = e;
    char exponent[PLOT_TICK_LABEL];
    if (!e)
        return;
    while (*digits == '0' && digits[1])
        digits++;
    snprintf(exponent, sizeof exponent, "e%s%s", e[1] == '-' ? "-" : "", digits);
    if (memchr(text, '.', (size_t)(e - text))) {
        while (end[-1] == '0')
            end--;
        if (end[-1] == '.')
            end--;
    }
    memmove(end, exponent, strlen(exponent) + 1);
}

const char *plot_tick_label(const plot_ticks *ticks, int i, char out[PLOT_TICK_LABEL])
{
    static const struct {
        double least;
        int exponent;
        const char *suffix;
    } scales[] = {{1e9, 9, "G"}, {1e6, 6, "M"}, {1e4, 3, "k"}};
    double value = plot_tick(ticks, i);
    double largest = fmax(fabs(plot_tick(ticks, 0)), fabs(plot_tick(ticks, ticks->count - 1)));
    int decimals = ticks->exponent < 0 ? -ticks->exponent : 0;
    if (value == 0) {
        return strcpy(out, "0");
    }
    if (decimals > MOST_DECIMALS || largest >= 1e15) {
        int digits = (int)floor(log10(fabs(value)) + LEAST_PART) - ticks->exponent;
        snprintf(out, PLOT_TICK_LABEL, "%.*e", digits < 0 ? 0 : digits > 15 ? 15 : digits, value);
        tidy_exponent(out);
        return out;
    }
    for (size_t k = 0; k < sizeof scales / sizeof *scales; k++) {
        int left = scales[k].exponent - ticks->exponent;
        if (largest < scales[k].least || left > 2)
            continue;
        snprintf(out, PLOT_TICK_LABEL, "%.*f%s", left < 0 ? 0 : left,
                 value / power(scales[k].exponent), scales[k].suffix);
        return out;
    }
    snprintf(out, PLOT_TICK_LABEL, "%.*f", decimals, value);
    return out;
}

/* --- the picture ------------------------------------------------------------------------------------ */

/* In pixels. */
enum {
    WIDTH = 960,
    COLUMNS = 2,
    CELL_WIDTH = WIDTH / COLUMNS,
    CELL_HEIGHT = 240,
    LEFT = 60,  /* of a panel in its cell: labels of numbers */
    ABOVE = 34, /* its name */
    PANEL_WIDTH = CELL_WIDTH - LEFT - 20,
    PANEL_HEIGHT = CELL_HEIGHT - ABOVE - 32,
    ROW = 20, /* of the legend */
    SAVE_MARK = 7,
    MOST_X_TICKS = 7,
    MOST_Y_TICKS = 6,
    COLORS = 8,
    NAME_BYTES = 120 /* of a run's name; longer ones lose their middle */
};

/* They are visible on white and on black. */
static const char *const colors[COLORS] = {"#2f7ed8", "#e07b00", "#2a9d4a", "#d1495b",
                                           "#8e63ce", "#0fa3a3", "#b8860b", "#808080"};
/* The next COLORS runs have dashes, and so on. */
static const char *const dashes[] = {"", " stroke-dasharray=\"6 3\"", " stroke-dasharray=\"2 3\""};

typedef struct panel_kind {
    const char *title;
    bool from_zero;
} panel_kind;
static const panel_kind kinds[PLOT_PANELS] = {{"loss", false},
                                              {"learning rate", true},
                                              {"norm of gradients", true},
                                              {"tokens per second", true}};

typedef struct panel {
    plot_kind kind;
    double left, top; /* of its inside */
    double x_low, x_high, y_low, y_high;
    plot_ticks x, y;
    fsdp_text *text;
} panel;

/* --- text ---------------------------------------------------------------------------------------- */

/* fsdp_printable has escaped control characters and what is not UTF-8. XML knows two characters less. */
static void add_escaped(fsdp_text *text, const char *plain)
{
    for (const char *at = plain; *at; at++) {
        const char *entity = *at == '<'   ? "&lt;"
                             : *at == '>' ? "&gt;"
                             : *at == '&' ? "&amp;"
                             : *at == '"' ? "&quot;"
                                          : NULL;
        if (memcmp(at, "\xef\xbf\xbe", strnlen(at, 3)) == 0 ||
            memcmp(at, "\xef\xbf\xbf", strnlen(at, 3)) == 0) {
            entity = "?";
            at += 2;
        }
        fsdp_text_add(text, entity ? entity : at, entity ? strlen(entity) : 1);
    }
}

static const char *dash_of(size_t run)
{
    return dashes[run / COLORS % (sizeof dashes / sizeof *dashes)];
}

/* --- points --------------------------------------------------------------------------------------- */

int plot_bin_points(const plot_bin *bin, plot_point points[PLOT_BIN_POINTS])
{
    const bool low_first = bin->low.step <= bin->high.step;
    const plot_point all[] = {bin->first, low_first ? bin->low : bin->high,
                              low_first ? bin->high : bin->low, bin->last};
    int count = 0;
    for (int i = 0; i < PLOT_BIN_POINTS && bin->used; i++) {
        if (count == 0 || all[i].step > points[count - 1].step)
            points[count++] = all[i];
    }
    return count;
}

/* --- ranges -------------------------------------------------------------------------------------- */

static void extend(const plot_series *series, double *low, double *high)
{
    if (series->count == 0)
        return;
    *low = fmin(*low, series->low);
    *high = fmax(*high, series->high);
}

/* All panels have one range of steps. */
static void find_ranges(panel *p, plot_run *const *runs, size_t count)
{
    p->x_low = p->y_low = INFINITY;
    p->x_high = p->y_high = -INFINITY;
    for (size_t r = 0; r < count; r++) {
        for (int kind = 0; kind < PLOT_KINDS; kind++) {
            const plot_series *series = &runs[r]->series[kind];
            if (series->started) {
                p->x_low = fmin(p->x_low, (double)series->base);
                p->x_high = fmax(p->x_high, (double)series->end);
            }
        }
        extend(&runs[r]->series[p->kind], &p->y_low, &p->y_high);
        if (p->kind == PLOT_LOSS)
            extend(&runs[r]->series[PLOT_EVAL], &p->y_low, &p->y_high);
    }
    if (p->y_low > p->y_high)
        p->y_low = p->y_high = 0;
    if (kinds[p->kind].from_zero)
        p->y_low = fmin(p->y_low, 0);
    p->x = plot_ticks_of_steps(p->x_low, p->x_high, MOST_X_TICKS);
    p->y = plot_ticks_between(p->y_low, p->y_high, MOST_Y_TICKS);
    if (p->x_low >= p->x_high) {
        p->x_low = plot_tick(&p->x, 0);
        p->x_high = plot_tick(&p->x, p->x.count - 1);
    }
    p->y_low = plot_tick(&p->y, 0);
    p->y_high = plot_tick(&p->y, p->y.count - 1);
}

static double x_of(const panel *p, double step)
{
    return p->left + (step - p->x_low) / (p->x_high - p->x_low) * PANEL_WIDTH;
}

/* Numbers beyond the largest of plot_ticks stand at the edge. */
static double y_of(const panel *p, double value)
{
    double part = value / (p->y_high - p->y_low) - p->y_low / (p->y_high - p->y_low);
    return p->top + (1 - fmin(fmax(part, 0), 1)) * PANEL_HEIGHT;
}

/* --- a panel ------------------------------------------------------------------------------------- */

static void add_axes(const panel *p)
{
    char label[PLOT_TICK_LABEL];
    double bottom = p->top + PANEL_HEIGHT;
    fsdp_text_addf(p->text,
                   "<text class=\"t\" x=\"%.0f\" y=\"%.0f\" font-weight=\"bold\">%s</text>\n",
                   p->left, p->top - 10, kinds[p->kind].title);
    for (int i = 0; i < p->y.count; i++) {
        double y = y_of(p, plot_tick(&p->y, i));
        fsdp_text_addf(p->text,
                       "<path class=\"g\" d=\"M%.0f %.1fh%d\" stroke=\"#e2e5e9\"/>"
                       "<text class=\"l\" x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                       p->left, y, PANEL_WIDTH, p->left - 8, y + 4,
                       plot_tick_label(&p->y, i, label));
    }
    for (int i = 0; i < p->x.count; i++) {
        double step = plot_tick(&p->x, i);
        if (step < p->x_low || step > p->x_high)
            continue;
        fsdp_text_addf(p->text,
                       "<path class=\"a\" d=\"M%.1f %.0fv5\" stroke=\"#8b939c\"/>"
                       "<text class=\"l\" x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n",
                       x_of(p, step), bottom, x_of(p, step), bottom + 18,
                       plot_tick_label(&p->x, i, label));
    }
    fsdp_text_addf(p->text, "<path class=\"a\" d=\"M%.0f %.0fh%d\" stroke=\"#8b939c\"/>\n", p->left,
                   bottom, PANEL_WIDTH);
}

static void add_line(const panel *p, const plot_series *series, size_t run)
{
    plot_point points[PLOT_BIN_POINTS];
    bool joined = false;
    if (series->count == 0)
        return;
    fsdp_text_addf(
        p->text,
        "<path fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" stroke-linejoin=\"round\" "
        "stroke-linecap=\"round\"%s d=\"",
        colors[run % COLORS], dash_of(run));
    for (int i = 0; i < PLOT_BINS; i++) {
        int count = plot_bin_points(&series->bins[i], points);
        for (int k = 0; k < count; k++) {
            /* "h0" makes a dot of a point that is joined to none */
            fsdp_text_addf(p->text, "%s%.1f %.1f%s", joined ? "L" : "M",
                           x_of(p, (double)points[k].step), y_of(p, points[k].value),
                           joined ? "" : "h0");
            joined = true;
        }
        joined = joined && !series->bins[i].broken;
    }
    fsdp_text_addf(p->text, "\"/>\n");
}

/* A line up from the axis at each save, one over the whole height at each restart: the first of each bin. */
static void add_marks(const panel *p, const plot_series *series, size_t run, int height,
                      const char *more)
{
    if (series->count == 0)
        return;
    fsdp_text_addf(p->text, "<path fill=\"none\" stroke=\"%s\"%s d=\"", colors[run % COLORS], more);
    for (int i = 0; i < PLOT_BINS; i++) {
        if (series->bins[i].used)
            fsdp_text_addf(p->text, "M%.1f %.0fv-%d", x_of(p, (double)series->bins[i].first.step),
                           p->top + PANEL_HEIGHT, height);
    }
    fsdp_text_addf(p->text, "\"/>\n");
}

static void add_points(const panel *p, const plot_series *series, size_t run)
{
    plot_point points[PLOT_BIN_POINTS];
    for (int i = 0; i < PLOT_BINS; i++) {
        int count = plot_bin_points(&series->bins[i], points);
        for (int k = 0; k < count; k++)
            fsdp_text_addf(p->text,
                           "<circle class=\"p\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\" "
                           "stroke=\"#ffffff\"/>\n",
                           x_of(p, (double)points[k].step), y_of(p, points[k].value),
                           colors[run % COLORS]);
    }
}

static void add_panel(panel *p, plot_run *const *runs, size_t count)
{
    find_ranges(p, runs, count);
    add_axes(p);
    for (size_t r = 0; r < count; r++) {
        const plot_series *series = runs[r]->series;
        add_marks(p, &series[PLOT_RESTART], r, PANEL_HEIGHT, " stroke-dasharray=\"4 4\"");
        add_marks(p, &series[PLOT_SAVE], r, SAVE_MARK, " stroke-width=\"2\"");
        add_line(p, &series[p->kind], r);
    }
    for (size_t r = 0; r < count && p->kind == PLOT_LOSS; r++)
        add_points(p, &runs[r]->series[PLOT_EVAL], r);
}

/* --- the legend ---------------------------------------------------------------------------------- */

static void add_run_row(fsdp_text *text, const plot_run *run, size_t r)
{
    char name[NAME_BYTES];
    int y = (int)(r + 1) * ROW;
    fsdp_text_addf(text,
                   "<path fill=\"none\" stroke=\"%s\" stroke-width=\"3\"%s d=\"M%d %dh24\"/>"
                   "<text class=\"t\" x=\"%d\" y=\"%d\">",
                   colors[r % COLORS], dash_of(r), LEFT, y - 4, LEFT + 32, y);
    add_escaped(text, fsdp_printable(run->name, strlen(run->name), name, sizeof name));
    const plot_series *loss = &run->series[PLOT_LOSS], *eval = &run->series[PLOT_EVAL];
    if (loss->count > 0)
        fsdp_text_addf(text, "<tspan class=\"l\" dx=\"10\">step %lld, loss %.4g",
                       (long long)loss->last.step, loss->last.value);
    else
        fsdp_text_addf(text, "<tspan class=\"l\" dx=\"10\">no steps");
    if (eval->count > 0)
        fsdp_text_addf(text, ", held out %.4g", eval->last.value);
    fsdp_text_addf(text, "</tspan></text>\n");
}

static void add_marks_row(fsdp_text *text, int y)
{
    fsdp_text_addf(text,
                   "<g class=\"k\" fill=\"none\" stroke=\"#808080\">"
                   "<circle cx=\"%d\" cy=\"%d\" r=\"3.5\" fill=\"#808080\" stroke=\"none\"/>"
                   "<path stroke-width=\"2\" d=\"M%d %dv-%d\"/>"
                   "<path stroke-dasharray=\"4 4\" d=\"M%d %dv-14\"/></g>"
                   "<text class=\"l\" x=\"%d\" y=\"%d\">held-out loss</text>"
                   "<text class=\"l\" x=\"%d\" y=\"%d\">save</text>"
                   "<text class=\"l\" x=\"%d\" y=\"%d\">restart</text>"
                   "<text class=\"l\" x=\"%d\" y=\"%d\" text-anchor=\"end\">over steps</text>\n",
                   LEFT + 12, y - 4, LEFT + 132, y - 1, SAVE_MARK, LEFT + 192, y + 1, LEFT + 32, y,
                   LEFT + 142, y, LEFT + 202, y, WIDTH - 20, y);
}

/* --- the whole ----------------------------------------------------------------------------------- */

/* Colours are attributes, for programs that know no style sheets; the style is for dark surroundings. */
static const char style[] =
    "<style>.l{fill:#59636e}.t{fill:#1f2328}\n"
    "@media (prefers-color-scheme:dark){.b{fill:#0d1117}.t{fill:#e6edf3}.l{fill:#9198a1}"
    ".g{stroke:#2a313a}.a{stroke:#6e7681}.p{stroke:#0d1117}}</style>\n";

void plot_draw(plot_run *const *runs, size_t count, fsdp_text *text)
{
    const int legend = (int)(count + 1) * ROW + 12;
    const int height = legend + CELL_HEIGHT * PLOT_PANELS / COLUMNS;
    fsdp_text_addf(text,
                   CLI_PICTURE
                   "plot: metrics of fsdp-train -->\n"
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                   "viewBox=\"0 0 %d %d\" role=\"img\" font-family=\"system-ui, sans-serif\" "
                   "font-size=\"12\" fill=\"#1f2328\">\n<title>metrics of fsdp-train</title>\n%s"
                   "<rect class=\"b\" width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
                   WIDTH, height, WIDTH, height, style, WIDTH, height);
    for (size_t r = 0; r < count; r++)
        add_run_row(text, runs[r], r);
    add_marks_row(text, (int)(count + 1) * ROW);
    for (int kind = 0; kind < PLOT_PANELS; kind++) {
        panel p = {.kind = (plot_kind)kind,
                   .left = kind % COLUMNS * CELL_WIDTH + LEFT,
                   .top = legend + kind / COLUMNS * CELL_HEIGHT + ABOVE,
                   .text = text};
        add_panel(&p, runs, count);
    }
    fsdp_text_addf(text, "</svg>\n");
}
