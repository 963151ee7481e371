"""The peers of `glove.py`: the published GloVe algorithms as plain C, single-threaded, compiled when asked for.

Both do what the published tools do, in their order and with their precision: training in double precision, record by
record, with scalar loops; counting with a dense array for pairs of frequent words, and a buffer for the others that
is sorted, written out when it is full, and merged at the end.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-funroll-loops")  # those of the published Makefile

TRAIN = r"""
#include <math.h>
#include <stdint.h>

struct record { int32_t word, context; double count; };

static double clipped(double gradient)
{
    return fmin(fmax(gradient, -100.0), 100.0);
}

/* One pass over n records; rows are d items and a bias, contexts after the v words. Returns the sum of costs. */
double train(double *rows, double *squares, const struct record *records, int64_t n, int64_t v, int64_t d,
             const double *settings)
{
    const double x_max = settings[0], alpha = settings[1], rate = settings[2];
    double cost = 0.0, updates[d], other_updates[d];
    for (int64_t k = 0; k < n; k++) {
        const int64_t a = (records[k].word - 1) * (d + 1), b = (v + records[k].context - 1) * (d + 1);
        const double count = records[k].count;
        double error = rows[a + d] + rows[b + d] - log(count);
        for (int64_t i = 0; i < d; i++)
            error += rows[a + i] * rows[b + i];
        double weighted = count > x_max ? error : pow(count / x_max, alpha) * error;
        cost += 0.5 * weighted * error;
        double sum = 0.0, other_sum = 0.0; /* to leave out an update that is no number */
        for (int64_t i = 0; i < d; i++) {
            const double t = rate * clipped(weighted * rows[b + i]), u = rate * clipped(weighted * rows[a + i]);
            updates[i] = t / sqrt(squares[a + i]);
            other_updates[i] = u / sqrt(squares[b + i]);
            sum += updates[i];
            other_sum += other_updates[i];
            squares[a + i] += t * t;
            squares[b + i] += u * u;
        }
        if (isfinite(sum) && isfinite(other_sum))
            for (int64_t i = 0; i < d; i++) {
                rows[a + i] -= updates[i];
                rows[b + i] -= other_updates[i];
            }
        rows[a + d] -= weighted / sqrt(squares[a + d]);
        rows[b + d] -= weighted / sqrt(squares[b + d]);
        squares[a + d] += weighted * weighted;
        squares[b + d] += weighted * weighted;
    }
    return cost;
}
"""

COUNT = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* count CORPUS VOCABULARY OUT WINDOW: symmetric co-occurrence records, sorted; prints how many. */

struct record { int32_t word, context; double count; };
struct entry { char *word; int32_t id; struct entry *next; };
enum { TABLE = 1 << 20, LONGEST = 1000, RUNS = 512 };
static const int64_t PRODUCT = 13300000, BUFFER = 38000000; /* what 4 GB of memory give the published tool */

static struct entry *table[TABLE];
static struct record *buffer;
static int64_t buffered;
static FILE *runs[RUNS];
static int num_runs;

static uint32_t hash(const char *word)
{
    uint32_t h = 1159241;
    while (*word)
        h = (h << 5) + (h >> 2) + (unsigned char)*word++;
    return h % TABLE;
}

static int32_t look_up(const char *word)
{
    for (struct entry *e = table[hash(word)]; e; e = e->next)
        if (strcmp(e->word, word) == 0)
            return e->id;
    return 0;
}

static int64_t read_vocabulary(const char *path)
{
    char word[LONGEST + 1], count[64];
    int64_t size = 0;
    FILE *in = fopen(path, "rb");
    while (fscanf(in, "%1000s %63s", word, count) == 2) {
        struct entry *e = malloc(sizeof *e);
        uint32_t h = hash(word);
        e->word = strdup(word);
        e->id = (int32_t)++size;
        e->next = table[h];
        table[h] = e;
    }
    fclose(in);
    return size;
}

/* The next word, 1; or 0 at the end of a line, -1 at the end of the text. */
static int next_word(FILE *in, char *word)
{
    int length = 0, c;
    while ((c = fgetc(in)) != EOF) {
        if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
            if (length) {
                if (c == '\n')
                    ungetc(c, in);
                break;
            }
            if (c == '\n')
                return 0;
            continue;
        }
        if (length < LONGEST)
            word[length++] = (char)c;
    }
    word[length] = 0;
    return length ? 1 : -1;
}

static int compare(const void *one, const void *other)
{
    const struct record *a = one, *b = other;
    if (a->word != b->word)
        return a->word < b->word ? -1 : 1;
    return a->context < b->context ? -1 : a->context > b->context;
}

static void spill(void)
{
    if (!buffered)
        return;
    qsort(buffer, (size_t)buffered, sizeof *buffer, compare);
    FILE *out = tmpfile();
    struct record sum = buffer[0];
    for (int64_t i = 1; i < buffered; i++) {
        if (compare(&sum, &buffer[i]) == 0) {
            sum.count += buffer[i].count;
        } else {
            fwrite(&sum, sizeof sum, 1, out);
            sum = buffer[i];
        }
    }
    fwrite(&sum, sizeof sum, 1, out);
    runs[num_runs++] = out;
    buffered = 0;
}

static int64_t merge(const char *path)
{
    static struct record heads[RUNS];
    static int alive[RUNS];
    int64_t written = 0;
    struct record sum = {0, 0, 0.0};
    FILE *out = fopen(path, "wb");
    for (int r = 0; r < num_runs; r++) {
        rewind(runs[r]);
        alive[r] = fread(&heads[r], sizeof heads[r], 1, runs[r]) == 1;
    }
    for (;;) {
        int least = -1;
        for (int r = 0; r < num_runs; r++)
            if (alive[r] && (least < 0 || compare(&heads[r], &heads[least]) < 0))
                least = r;
        if (least >= 0 && sum.word && compare(&sum, &heads[least]) == 0) {
            sum.count += heads[least].count;
        } else {
            if (sum.word) {
                fwrite(&sum, sizeof sum, 1, out);
                written++;
            }
            if (least < 0)
                break;
            sum = heads[least];
        }
        alive[least] = fread(&heads[least], sizeof heads[least], 1, runs[least]) == 1;
    }
    fclose(out);
    return written;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    const int window = atoi(argv[4]);
    const int64_t size = read_vocabulary(argv[2]);
    int64_t *begin = malloc((size_t)(size + 2) * sizeof *begin);
    begin[1] = 0;
    for (int64_t i = 1; i <= size; i++)
        begin[i + 1] = begin[i] + (PRODUCT / i < size ? PRODUCT / i : size);
    double *dense = calloc((size_t)begin[size + 1] + 1, sizeof *dense);
    buffer = malloc((size_t)BUFFER * sizeof *buffer);
    int32_t *history = malloc((size_t)window * sizeof *history);
    char word[LONGEST + 1];
    FILE *in = fopen(argv[1], "rb");
    int64_t place = 0;
    for (int found; (found = next_word(in, word)) >= 0;) {
        if (!found) {
            place = 0;
            continue;
        }
        const int32_t id = look_up(word);
        if (!id)
            continue;
        if (buffered > BUFFER - 2 * window)
            spill();
        for (int64_t k = place - 1; k >= 0 && k >= place - window; k--) {
            const int32_t other = history[k % window];
            const double weight = 1.0 / (double)(place - k);
            if ((int64_t)id * other <= PRODUCT) {
                dense[begin[other] + id - 1] += weight;
                dense[begin[id] + other - 1] += weight;
            } else {
                buffer[buffered++] = (struct record){other, id, weight};
                buffer[buffered++] = (struct record){id, other, weight};
            }
        }
        history[place++ % window] = id;
    }
    spill();
    FILE *frequent = tmpfile();
    for (int64_t i = 1; i <= size; i++)
        for (int64_t j = begin[i]; j < begin[i + 1]; j++)
            if (dense[j] != 0) {
                struct record r = {(int32_t)i, (int32_t)(j - begin[i] + 1), dense[j]};
                fwrite(&r, sizeof r, 1, frequent);
            }
    runs[num_runs++] = frequent;
    printf("%lld\n", (long long)merge(argv[3]));
    return 0;
}
"""


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_trainer(folder: Path) -> ctypes.CDLL:
    """The training loop as a library; `train` gives back the sum of costs."""
    library = ctypes.CDLL(str(_build(folder, "train", TRAIN, "-shared", "-fPIC")))
    library.train.restype = ctypes.c_double
    return library


def build_counter(folder: Path) -> Path:
    """The counter as a program."""
    return _build(folder, "count", COUNT)


def _build(folder: Path, name: str, source: str, *more: str) -> Path:
    built = compiler()
    assert built is not None, "the caller looks for a compiler first"
    (folder / f"{name}.c").write_text(source)
    command = [built, *FLAGS, *more, "-o", str(folder / name), str(folder / f"{name}.c"), "-lm"]
    subprocess.run(command, check=True)
    return folder / name
