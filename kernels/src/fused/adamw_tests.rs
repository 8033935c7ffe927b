//! Steps and norms against f64.

use super::*;
use crate::tests::Rows;
use linattn_oracle::{Rng, assert_close};

const HYPER: Hyper = Hyper {
    learning_rate: 3e-3,
    beta_1: 0.9,
    beta_2: 0.99,
    epsilon: 1e-5,
    correction_1: 0.271,
    correction_2: 0.029_701,
};

fn draw(name: &str, len: usize, rows: Rows) -> Vec<f64> {
    let mut rng = Rng::named(3, name);
    let mut values = (0..len).map(|_| rng.normal()).collect::<Vec<_>>();
    rows.round(&mut values);
    values
}

/// A tensor's numbers, in the order of [`Tensors`].
struct Numbers {
    values: [Vec<f64>; 4],
    handles: [Handle; 4],
    decay: f32,
}

impl Numbers {
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        nth: usize,
        len: usize,
        param: Rows,
        gradient: Rows,
    ) -> Self {
        let types = [param, gradient, Rows::F32, Rows::F32];
        let names = ["p", "g", "m", "v"];
        let mut values =
            [0, 1, 2, 3].map(|n: usize| draw(&format!("{} {nth}", names[n]), len, types[n]));
        values[2].iter_mut().for_each(|m| *m *= 0.1);
        values[3].iter_mut().for_each(|v| *v = *v * *v * 0.01);
        values[2..].iter_mut().for_each(|moment| Rows::F32.round(moment));
        let handles =
            [0, 1, 2, 3].map(|n: usize| client.create_from_slice(&types[n].bytes(&values[n])));
        Self { values, handles, decay: if nth.is_multiple_of(2) { 0.1 } else { 0.0 } }
    }

    fn tensors(&self) -> Tensors<'_> {
        let [param, gradient, m, v] = &self.handles;
        Tensors { param, gradient, m, v, len: self.values[0].len(), decay: self.decay }
    }

    /// The expected result of the step: parameters and moments.
    fn stepped(&self, factor: f64) -> [Vec<f64>; 3] {
        let single = |x: f32| f64::from(x);
        let mut all = [vec![], vec![], vec![]];
        for n in 0..self.values[0].len() {
            let [p, g, m, v] = [0, 1, 2, 3].map(|x: usize| self.values[x][n]);
            let g = g * factor;
            let m = single(HYPER.beta_1) * m + (1.0 - single(HYPER.beta_1)) * g;
            let v = single(HYPER.beta_2) * v + (1.0 - single(HYPER.beta_2)) * g * g;
            let root = (v / single(HYPER.correction_2)).sqrt() + single(HYPER.epsilon);
            let kept = p * (1.0 - HYPER.learning_rate * single(self.decay));
            all[0].push(kept - HYPER.learning_rate * m / single(HYPER.correction_1) / root);
            all[1].push(m);
            all[2].push(v);
        }
        all
    }
}

/// `clip`: the norm and the longest.
fn steps_are_right<R: Runtime>(
    client: &ComputeClient<R>,
    lens: &[usize],
    [param, gradient]: [Rows; 2],
    clip: Option<[f32; 2]>,
) {
    let numbers: Vec<Numbers> =
        (0..lens.len()).map(|nth| Numbers::new(client, nth, lens[nth], param, gradient)).collect();
    let tensors: Vec<_> = numbers.iter().map(Numbers::tensors).collect();
    let norm = client.create_from_slice(&clip.unwrap_or_default()[0].to_le_bytes());
    let given = clip.map(|[_, longest]| Clip { norm: &norm, longest });
    let types = Types { param: param.dtype(), gradient: gradient.dtype() };
    let run = || {
        let updated = step(client, &tensors, HYPER, given, types).expect("nothing is wrong");
        let read = |x: &Buffer| client.read_one(x.handle.clone()).expect("it ran").to_vec();
        updated.iter().map(|x| [&x.param, &x.m, &x.v].map(read)).collect::<Vec<_>>()
    };
    let factor = clip
        .map_or(1.0, |[norm, longest]| (f64::from(longest) / (f64::from(norm) + 1e-6)).min(1.0));
    let got = run();
    assert_eq!(got.len(), lens.len());
    for (nth, (numbers, got)) in numbers.iter().zip(&got).enumerate() {
        let want = numbers.stepped(factor);
        for (n, rows) in [param, Rows::F32, Rows::F32].into_iter().enumerate() {
            let what = format!("{} of {nth}, {lens:?}, {clip:?}, {param:?}", ["p", "m", "v"][n]);
            let limit = if rows == Rows::F32 { 1e-5 } else { 8e-3 };
            assert_close(&what, &want[n], &rows.numbers(&got[n]), limit);
        }
    }
    assert!(got == run(), "{lens:?}: the same bits");
}

fn norms_are_right<R: Runtime>(client: &ComputeClient<R>, lens: &[usize], rows: Rows) {
    let values: Vec<_> = (0..lens.len()).map(|n| draw(&format!("g {n}"), lens[n], rows)).collect();
    let handles: Vec<_> = values.iter().map(|x| client.create_from_slice(&rows.bytes(x))).collect();
    let given: Vec<_> = handles.iter().zip(lens).map(|(handle, len)| (handle, *len)).collect();
    let run = || {
        let got = norm(client, &given, rows.dtype()).expect("nothing is wrong");
        client.read_one(got.handle).expect("it ran").to_vec()
    };
    let want = values.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    let got = run();
    assert_close(&format!("{lens:?}, {rows:?}"), &[want], &Rows::F32.numbers(&got), 1e-5);
    assert!(got == run(), "{lens:?}: the same bits");
}

/// A norm of NaN must not look like a gradient that is short enough.
fn nan_stays_nan<R: Runtime>(client: &ComputeClient<R>) {
    let numbers = Numbers::new(client, 0, 4, Rows::F32, Rows::F32);
    let norm = client.create_from_slice(&f32::NAN.to_le_bytes());
    let clip = Clip { norm: &norm, longest: 1.0 };
    let types = Types { param: F32, gradient: F32 };
    let updated = step(client, &[numbers.tensors()], HYPER, Some(clip), types).expect("it runs");
    let got = client.read_one(updated[0].param.handle.clone()).expect("it ran");
    assert!(Rows::F32.numbers(&got).iter().all(|p| p.is_nan()), "{got:?}");
}

#[test]
fn launches_are_few_and_even() {
    let counts = |widths: &[usize], most| {
        let all = launches(widths, most);
        all.into_iter().map(|(width, part)| (width, part.len())).collect::<Vec<_>>()
    };
    assert_eq!(counts(&[4; 22], 24), [(4, 22)]);
    assert_eq!(counts(&[4; 22], 16), [(4, 11), (4, 11)]);
    assert_eq!(counts(&[4, 1, 4, 4, 1], 2), [(4, 2), (4, 1), (1, 2)]);
    assert_eq!(counts(&[], 2), []);
    assert_eq!(launches(&[4, 1, 4], 2), [(4, vec![0, 2]), (1, vec![1])]);
}

/// Lengths that are multiples of 4, and that are not; short, and of more than one cube.
const LENS: [&[usize]; 4] =
    [&[4], &[1, 1030, 8, 255], &[1024, 2052, 4], &[12, 8, 4, 16, 20, 24, 3]];

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn steps_are_those_of_the_formula() {
            with_client(|client| {
                for lens in LENS {
                    steps_are_right(client, lens, [Rows::F32; 2], None);
                    steps_are_right(client, lens, [Rows::F32; 2], Some([3.0, 1.0]));
                }
                steps_are_right(client, LENS[1], [Rows::F32; 2], Some([0.5, 1.0]));
                for rows in [Rows::F16, Rows::Bf16] {
                    if check_type(client, rows.dtype()).is_ok() {
                        steps_are_right(client, LENS[1], [Rows::F32, rows], Some([3.0, 1.0]));
                        steps_are_right(client, LENS[2], [rows; 2], None);
                    }
                }
            });
        }

        #[test]
        fn gradient_norms_are_right() {
            with_client(|client| {
                for lens in LENS {
                    norms_are_right(client, lens, Rows::F32);
                }
                norms_are_right(client, &[70_000, 3, 40_004], Rows::F32);
                norms_are_right(client, &[4; 40], Rows::F32);
                for rows in [Rows::F16, Rows::Bf16] {
                    if check_type(client, rows.dtype()).is_ok() {
                        norms_are_right(client, LENS[1], rows);
                    }
                }
            });
        }

        #[test]
        fn a_norm_of_nan_is_seen() {
            with_client(nan_stays_nan);
        }

        #[test]
        fn tensors_without_numbers_are_refused() {
            with_client(|client| {
                let handle = client.create_from_slice(&[0; 4]);
                assert!(norm(client, &[(&handle, 0)], F32).is_err(), "no number");
                assert!(norm(client, &[], F32).is_err(), "no tensor");
                let types = Types { param: F32, gradient: F32 };
                let none = step(client, &[], HYPER, None, types).expect("nothing to do");
                assert!(none.is_empty());
            });
        }
    };
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!();
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!();
}
