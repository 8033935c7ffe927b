//! The time of one operation, the gated delta rule, in chunks and token by token: over the length of a sequence and the
//! width of a head, forwards alone and with the backward pass. Rows and pictures; rows that a run does not time stay
//! in the folder.
//!
//! `cargo run --release --features measure --example chunk_or_step -- --device cpu experiments/chunk_or_step`

mod device;
mod picture;
mod row;
mod ways;

use device::Job;
use linattn::backend::LinearAttentionBackend;
use linattn::ops;
use linattn_oracle::relative_error;
use row::{LENGTHS, Row, WIDTHS};
use std::error::Error;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use ways::{Call, Found, Pass, Sequence, Way};

/// Samples of each time; the ways take turns, so that other work on the machine meets all of them.
const SAMPLES: usize = 7;
/// A sample is as many calls as take that long, at most [`MOST_CALLS`].
const SAMPLE_SECONDS: f64 = 2e-3;
const MOST_CALLS: f64 = 20.0;
/// Between two ways, TF32 included.
const LIMIT: f64 = 1e-2;

const USE: &str = "wanted: [--device NAME] [--least-width N] [--most-tokens N] [--most-steps N] \
                   [--without WAY] and the folder that rows and pictures go to";

fn main() -> ExitCode {
    let timed =
        arguments().and_then(|Arguments { device, times }| device::dispatch(&device, times)?);
    match timed {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

/// The command line's options.
struct Arguments {
    device: String,
    times: Times,
}

/// The device `cpu`, all lengths and all ways where nothing else is said.
fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let (mut device, mut folder) = ("cpu".to_string(), None);
    let (mut least_width, mut most_tokens, mut most_steps) = (WIDTHS[0], LENGTHS[6], LENGTHS[6]);
    let mut ways = Way::ALL.to_vec();
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        match (argument.as_str(), &folder) {
            ("--device", _) => device = rest.next().ok_or("`--device` wants a name")?,
            ("--least-width" | "--most-tokens" | "--most-steps", _) => {
                let number = rest.next().ok_or(format!("`{argument}` wants a number"))?;
                let bound = match argument.as_str() {
                    "--least-width" => &mut least_width,
                    "--most-tokens" => &mut most_tokens,
                    _ => &mut most_steps,
                };
                *bound = number
                    .parse()
                    .map_err(|_| format!("`{argument}` is {number}; it has to be a number"))?;
            }
            ("--without", _) => {
                let name = rest.next().ok_or("`--without` wants a way")?;
                let way = [Way::Chunks, Way::Steps].into_iter().find(|way| way.to_string() == name);
                let way =
                    way.ok_or(format!("`--without` is {name}; it has to be chunks or steps"))?;
                ways.retain(|other| *other != way);
            }
            (name, None) if !name.starts_with('-') => folder = Some(argument.into()),
            _ => return Err(format!("`{argument}` is not known; {USE}").into()),
        }
    }
    let folder = folder.ok_or_else(|| format!("no folder is named; {USE}"))?;
    if least_width > WIDTHS[3] {
        return Err(format!("`--least-width` is {least_width}; the widest is {}", WIDTHS[3]).into());
    }
    Ok(Arguments { device, times: Times { least_width, most_tokens, most_steps, ways, folder } })
}

struct Times {
    /// Narrower heads are left out.
    least_width: usize,
    most_tokens: usize,
    /// Longer sequences are not taken a call a token, whose gradients take the longest.
    most_steps: usize,
    ways: Vec<Way>,
    folder: PathBuf,
}

impl Job for Times {
    type Output = Result<(), Box<dyn Error>>;

    fn run<B: LinearAttentionBackend>(self, device: &B::Device) -> Self::Output {
        let file = self.folder.join("rows.csv");
        let mut rows = read(&file)?;
        for width in WIDTHS.into_iter().filter(|&width| width >= self.least_width) {
            for tokens in LENGTHS.into_iter().filter(|&tokens| tokens <= self.most_tokens) {
                let ways: Vec<Way> = self
                    .ways
                    .iter()
                    .copied()
                    .filter(|way| *way != Way::Steps || tokens <= self.most_steps)
                    .collect();
                let timed = cell::<B>(&Sequence::new(tokens, width), &ways, device)?;
                let again = |row: &Row| {
                    (row.width, row.tokens) == (width, tokens) && ways.contains(&row.way)
                };
                rows.retain(|row| !again(row));
                rows.extend(timed);
            }
            // After each width, so that what was timed stays where a later one is cut off.
            write(&rows, &file)?;
            picture::draw(&rows, ops::path::<B>(device), &self.folder)?;
            eprintln!("width {width} is timed");
        }
        Ok(())
    }
}

const HEADER: &str = "pass,way,width,tokens,ms,fastest_ms";

/// The table of what was timed before; nothing where there is none.
fn read(path: &Path) -> Result<Vec<Row>, String> {
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(vec![]),
        read => read.map_err(|e| format!("can't read {}: {e}", path.display()))?,
    };
    let row = |(n, line): (usize, &str)| {
        let wanted = || format!("line {} of {} is not one of {HEADER}", n + 1, path.display());
        Row::read(line).ok_or_else(wanted)
    };
    text.lines().enumerate().filter(|(_, line)| *line != HEADER).map(row).collect()
}

/// Writes the table of what was timed.
fn write(rows: &[Row], path: &Path) -> Result<(), String> {
    let mut text = format!("{HEADER}\n");
    for Row { way, pass, width, tokens, ms: [ms, fastest] } in rows {
        text += &format!("{pass},{way},{width},{tokens},{ms:.4},{fastest:.4}\n");
    }
    std::fs::write(path, text).map_err(|e| format!("can't write {}: {e}", path.display()))
}

/// Medians and fastest samples of all ways, after making sure that they agree.
fn cell<B: LinearAttentionBackend>(
    x: &Sequence,
    ways: &[Way],
    device: &B::Device,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let (mut timed, [tokens, width]) = (vec![], x.size());
    for pass in [Pass::Forward, Pass::Both] {
        let calls: Vec<_> =
            ways.iter().map(|&way| (way, ways::call::<B>((way, pass), x, device))).collect();
        let first = calls[0].1()?;
        for (way, call) in &calls[1..] {
            compare(&first, &call()?).map_err(|why| format!("{pass} by {way}: {why}"))?;
        }
        let once = |call: &Call<B>| sample(call, 1, device);
        let repeats = calls
            .iter()
            .map(|(_, call)| Ok((SAMPLE_SECONDS / once(call)?).clamp(1.0, MOST_CALLS) as usize));
        let repeats = repeats.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let mut samples = vec![vec![]; calls.len()];
        for _ in 0..SAMPLES {
            for (i, (_, call)) in calls.iter().enumerate() {
                samples[i].push(1e3 * sample(call, repeats[i], device)?);
            }
        }
        for ((way, _), mut samples) in calls.iter().zip(samples) {
            samples.sort_by(f64::total_cmp);
            let ms = [samples[SAMPLES / 2], samples[0]];
            timed.push(Row { way: *way, pass, width, tokens, ms });
        }
    }
    Ok(timed)
}

/// Seconds of a call, after one that is not timed. What another way has left of its memory is given back before: on a
/// GPU a call beside thousands of small pieces takes several times as long.
fn sample<B: LinearAttentionBackend>(
    call: &Call<B>,
    calls: usize,
    device: &B::Device,
) -> Result<f64, Box<dyn Error>> {
    let once = || -> Result<(), Box<dyn Error>> {
        let _found = call()?;
        B::sync(device).map_err(|e| format!("the device failed: {e}").into())
    };
    B::memory_cleanup(device);
    once()?;
    let begin = Instant::now();
    for _ in 0..calls {
        once()?;
    }
    Ok(begin.elapsed().as_secs_f64() / calls as f64)
}

/// Holds one way to another.
fn compare<B: LinearAttentionBackend>(want: &Found<B>, got: &Found<B>) -> Result<(), String> {
    let of = |(o, d_v): &Found<B>| {
        let tensors = [Some(o), d_v.as_ref()].into_iter().flatten();
        tensors.flat_map(|x| x.to_data().iter::<f64>().collect::<Vec<_>>()).collect::<Vec<f64>>()
    };
    let error = relative_error(&of(want), &of(got));
    match error <= LIMIT {
        true => Ok(()),
        false => Err(format!("differs by {error:.1e} of what one call gives")),
    }
}
