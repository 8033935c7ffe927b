//! The host's side: tensors in and out, buffers, and the launches of one forward or backward pass.

use crate::buffer::{Buffer, array, buffer, whole};
use crate::chunkwise::arguments::{
    GradientsLaunch, IntraChunkLaunch, OperandsLaunch, RowPairsLaunch, SavedTensorsLaunch,
};
use crate::chunkwise::buffers::{
    GradientBuffers, PassBuffers, PassGradients, Saved, Scores, UNUSED,
};
use crate::chunkwise::choose::{Plans, plans, varlen_plans};
use crate::chunkwise::chunk::SizesLaunch;
use crate::chunkwise::decay::decay_factors;
use crate::chunkwise::input_gradients::input_gradients;
use crate::chunkwise::intra_chunk::intra_chunk;
use crate::chunkwise::plan::{Plan, StatePlan};
use crate::chunkwise::sequence_parallel::{COLUMNS, UNITS, combine_decays, combine_matrices};
use crate::chunkwise::state::{RegisterState, SharedMemoryState, StatePlace};
use crate::chunkwise::state_pass::{state_pass_backward, state_pass_forward};
use crate::chunkwise::task::{Span, Task};
use crate::chunkwise::varlen::Table;
use crate::refusal::{F32, Refusal, U32};
use crate::tensors::{Backward, Forward, Given, Inputs, check_tensors};
use crate::tile::Engine;
use crate::variant::{Dims, Variant};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// One call: what every launch needs.
struct Call<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    plans: Plans,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    row: Option<&'a Row>,
    x: &'a Inputs,
}

/// Sequences with lengths of their own, in one row.
struct Row {
    sequences: usize,
    chunks: usize,
    table: Buffer,
}

impl Row {
    fn new<R: Runtime>(client: &ComputeClient<R>, table: &Table) -> Self {
        let handle = client.create_from_slice(&table.bytes());
        let shape = vec![table.numbers.len()];
        Self {
            sequences: table.sequences,
            chunks: table.chunks,
            table: Buffer { handle, shape, dtype: U32 },
        }
    }
}

/// The kernels of one call, planned once for its forward and its backward pass.
pub struct Chunkwise<R: Runtime> {
    client: ComputeClient<R>,
    plans: Plans,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    row: Option<Row>,
}

impl<R: Runtime> Chunkwise<R> {
    /// Plans for a device; `dtype` is that of the rows.
    ///
    /// # Errors
    /// [`Refusal`] names what the kernels cannot take.
    pub fn new(
        client: &ComputeClient<R>,
        variant: Variant,
        dims: Dims,
        dtype: StorageType,
    ) -> Result<Self, Refusal> {
        let plans = plans(client, variant, dims, dtype)?;
        Ok(Self { client: client.clone(), plans, variant, dims, dtype, row: None })
    }

    /// Plans for sequences of different lengths, one after another in one row: B is 1, and sequence n has the
    /// tokens `cu_seqlens[n]..cu_seqlens[n + 1]`. First and last states are `[N, H, K, V]`, all other tensors as
    /// of one sequence.
    ///
    /// # Errors
    /// [`Refusal`] names what the kernels cannot take.
    pub fn varlen(
        client: &ComputeClient<R>,
        variant: Variant,
        dims: Dims,
        dtype: StorageType,
        cu_seqlens: &[usize],
    ) -> Result<Self, Refusal> {
        let plans = varlen_plans(client, variant, dims, dtype, cu_seqlens)?;
        let row = Row::new(client, &Table::new(cu_seqlens, plans.state_pass.chunk));
        Ok(Self { client: client.clone(), plans, variant, dims, dtype, row: Some(row) })
    }

    /// Cut into so many segments, in place of as many as fit the device.
    #[cfg(test)]
    pub(crate) fn in_segments(mut self, segments: Option<usize>) -> Self {
        self.plans.segments = segments.unwrap_or(self.plans.segments);
        self
    }

    /// Whether a forward pass that saves nothing is one launch, by other kernels than one that saves.
    #[cfg(test)]
    pub(crate) fn has_own_inference(&self) -> bool {
        let whole = self.row.is_some() || self.plans.segments == 1;
        whole && self.plans.one_launch.is_some()
    }

    fn call<'a>(&'a self, x: &'a Inputs) -> Call<'a, R> {
        if let Err(why) = check_tensors(self.variant, x) {
            panic!("tensors of {:?}: {why}", self.variant);
        }
        let Self { client, plans, variant, dims, dtype, row } = self;
        let (plans, variant, dims, dtype) = (*plans, *variant, *dims, *dtype);
        Call { client, plans, variant, dims, dtype, row: row.as_ref(), x }
    }

    /// Whole sequences. `save` leaves in `saved` what [`Self::backward`] needs.
    ///
    /// # Panics
    /// If `x` has other tensors than the variant.
    pub fn forward(&self, x: &Inputs, save: bool) -> Forward {
        let mut call = self.call(x);
        if !save {
            call.plans = call.plans.of_inference(call.segments());
        }
        let scores = call.intra_chunk();
        let (o, state, saved) = call.state_pass_forward(scores, save);
        let saved = if save { saved.save() } else { vec![] };
        Forward { o, state, saved }
    }

    /// Gradients of every input.
    ///
    /// # Panics
    /// If `given` is not of a forward pass of the same variant.
    pub fn backward(&self, given: Given<'_>) -> Backward {
        let call = self.call(given.x);
        let saved = Saved::restore(given.saved);
        let back = call.state_pass_backward(&saved, given.d_o, given.d_state);
        let d_start = back.start.clone();
        let out = call.gradients(&saved, back, given.d_o);
        let variant = self.variant;
        Backward {
            q: out.q,
            k: out.k,
            v: out.v,
            a: variant.own_a().then_some(out.a),
            b: variant.low_rank().then_some(out.b),
            g: (variant.decay != crate::Decay::None).then_some(out.g),
            beta: variant.delta().then_some(out.beta),
            state: d_start,
        }
    }
}

impl<R: Runtime> Call<'_, R> {
    /// Chunks of a sequence; of all where sequences have lengths of their own.
    fn chunks(&self) -> usize {
        match self.row {
            Some(row) => row.chunks,
            None => self.dims.tokens.div_ceil(self.plans.state_pass.chunk),
        }
    }

    /// Chunks of a segment.
    fn segment(&self) -> usize {
        match self.row {
            Some(row) => row.chunks,
            None => self.plans.segment(self.dims),
        }
    }

    fn segments(&self) -> usize {
        self.chunks().div_ceil(self.segment())
    }

    /// Sequences, each with states of its own.
    fn sequences(&self) -> usize {
        self.row.map_or(self.dims.batch, |row| row.sequences)
    }

    fn buffer(&self, shape: &[usize], dtype: StorageType) -> Buffer {
        buffer(self.client, shape, dtype)
    }

    fn buffer_if(&self, there: bool, shape: &[usize], dtype: StorageType) -> Buffer {
        // A tensor that the variant does not have is bound to a few numbers that are neither read nor written.
        if there { self.buffer(shape, dtype) } else { self.buffer(&UNUSED, dtype) }
    }

    fn sizes(&self) -> SizesLaunch<R> {
        let Dims { tokens, heads, key_heads, .. } = self.dims;
        let (chunks, segment) = (self.chunks() as u32, self.segment() as u32);
        let table = match self.row {
            Some(row) => whole(&row.table),
            None => array(&self.x.q, 1),
        };
        SizesLaunch::new(tokens as u32, heads as u32, key_heads as u32, chunks, segment, table)
    }

    fn keys_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, key_heads, key_width, .. } = self.dims;
        [batch, tokens, key_heads, key_width]
    }

    fn rows_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, heads, key_width, .. } = self.dims;
        [batch, tokens, heads, key_width]
    }

    fn values_shape(&self) -> [usize; 4] {
        let Dims { batch, tokens, heads, value_width, .. } = self.dims;
        [batch, tokens, heads, value_width]
    }

    fn scalars_shape(&self) -> [usize; 3] {
        let Dims { batch, tokens, heads, .. } = self.dims;
        [batch, tokens, heads]
    }

    fn state_shape(&self) -> [usize; 4] {
        let Dims { heads, key_width, value_width, .. } = self.dims;
        [self.sequences(), heads, key_width, value_width]
    }

    /// A matrix of a chunk's own.
    fn own_shape(&self, rows: usize, columns: usize) -> [usize; 5] {
        let Dims { batch, heads, .. } = self.dims;
        [batch, heads, self.chunks(), rows, columns]
    }

    /// Cubes of chunks.
    fn cubes(&self, across: usize) -> CubeCount {
        let Dims { batch, heads, .. } = self.dims;
        CubeCount::Static(across as u32, (batch * heads) as u32, 1)
    }

    fn operands<F: Float, G: Size>(&self) -> OperandsLaunch<F, G, R> {
        let numbers = |shape: &[usize]| shape.iter().product::<usize>();
        let (keys, rows) = (numbers(&self.keys_shape()), numbers(&self.rows_shape()));
        let (values, scalars) = (numbers(&self.values_shape()), numbers(&self.scalars_shape()));
        let x = self.x;
        let or_q = |handle: &Option<Handle>, len| match handle {
            Some(handle) => array(handle, len),
            None => array(&x.q, 16),
        };
        let vector = self.variant.vector();
        // Log decays that are not there: any f32 tensor would do; none is sure to be f32, and none is read.
        let scalar_g = x.g.as_ref().filter(|_| !vector);
        let vector_g = x.g.as_ref().filter(|_| vector);
        OperandsLaunch::new(
            array(&x.q, keys),
            array(&x.k, keys),
            or_q(&x.a, rows),
            or_q(&x.b, rows),
            array(&x.v, values),
            array(scalar_g.unwrap_or(&x.q), if scalar_g.is_some() { scalars } else { 1 }),
            array(vector_g.unwrap_or(&x.q), if vector_g.is_some() { rows } else { 1 }),
            array(x.beta.as_ref().unwrap_or(&x.q), if x.beta.is_some() { scalars } else { 1 }),
        )
    }

    /// Shapes and types of what the intra-chunk stage leaves. A matrix that the variant has not is None.
    fn score_shapes(&self) -> Scores<(Option<Vec<usize>>, StorageType)> {
        let plan = self.plans.intra_chunk;
        let e = self.plans.between;
        let made = self.plans.state_pass.producers() == 0;
        let (solves, low_rank) = (self.variant.solves(), self.variant.low_rank());
        let vector = self.variant.vector();
        let shape = |there: bool, shape: &[usize]| (there && made).then(|| shape.to_vec());
        let square = self.own_shape(plan.chunk, plan.chunk);
        let rows = self.rows_shape();
        Scores {
            a_qk: (shape(true, &square), e),
            a_qb: (shape(low_rank, &square), e),
            inverse: (shape(solves, &square), e),
            a_ak: (shape(low_rank, &square), e),
            a_ak_v: (shape(low_rank, &self.values_shape()), e),
            decay_factors: (shape(true, &self.own_shape(decay_factors::ROWS, plan.chunk)), F32),
            q: (shape(vector, &rows), e),
            a: (shape(vector && solves, &rows), e),
            b: (shape(vector && low_rank, &rows), e),
            k: (shape(vector, &rows), e),
            chunk_decay: (shape(vector, &self.own_shape(1, plan.key_width)), F32),
        }
    }

    /// The intra-chunk stage. With producer planes the state pass computes these matrices itself, an identity
    /// transition's backward too, and the buffers are placeholders.
    fn intra_chunk(&self) -> Scores<Buffer> {
        let shapes = self.score_shapes();
        if self.plans.state_pass.producers() > 0 {
            let none = self.buffer(&UNUSED, F32);
            return shapes.map(|_| none.clone());
        }
        let plan = self.plans.intra_chunk;
        let e = self.plans.between;
        let out = shapes.map(|(shape, dtype)| match shape {
            Some(shape) => self.buffer(&shape, dtype),
            None => self.buffer(&UNUSED, dtype),
        });
        let [g, n, m, _, pairs, _] = self.stage_widths(&plan);
        // Scaled rows of a vector decay are written in pairs.
        let t = if self.variant.vector() { pairs } else { plan.engine.store_width().max(pairs) };
        // SAFETY: every index is below the lengths that `check_sizes` and the shapes above fix.
        #[allow(unsafe_code)]
        unsafe {
            intra_chunk::launch_unchecked::<R>(
                self.client,
                self.cubes(self.chunks()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                out.written(),
                self.sizes(),
                plan,
                [self.dtype, plan.engine.tile_type(e), e],
                [g, n, m, t],
            );
        }
        out
    }

    /// Saved scores, as the state pass reads them.
    fn read<E: Float, G: Size>(&self, scores: &Scores<Handle>) -> IntraChunkLaunch<E, G, R> {
        let shapes = self.score_shapes();
        let of = |handle: &Handle, (shape, _): (Option<Vec<usize>>, _)| {
            array(handle, shape.map_or(UNUSED[0], |shape| shape.iter().product()))
        };
        IntraChunkLaunch::new(
            of(&scores.a_qk, shapes.a_qk),
            of(&scores.a_qb, shapes.a_qb),
            of(&scores.inverse, shapes.inverse),
            of(&scores.a_ak, shapes.a_ak),
            of(&scores.a_ak_v, shapes.a_ak_v),
            of(&scores.decay_factors, shapes.decay_factors),
            of(&scores.q, shapes.q),
            of(&scores.a, shapes.a),
            of(&scores.b, shapes.b),
            of(&scores.k, shapes.k),
            of(&scores.chunk_decay, shapes.chunk_decay),
        )
    }

    /// Widths of vectors that an engine loads, holds in tiles, and writes.
    fn widths(&self, engine: Engine) -> [usize; 4] {
        let [n, m] = engine.tile_widths();
        [self.plans.load_width, n, m, engine.store_width()]
    }

    /// Widths of vectors around the state pass: loaded; in tiles of keys, of products, and of values; of tensors whose
    /// rows lie as accumulators do; and written.
    fn stage_widths(&self, plan: &Plan) -> [usize; 6] {
        let [n, m] = plan.engine.tile_widths();
        let [g, l, t, w] = self.widths(plan.unscaled().engine);
        [g, n, m, l, t, w]
    }

    /// One launch of the state pass: forward, or backward from `d_o`.
    fn state_pass(
        &self,
        scores: &Scores<Handle>,
        d_o: Option<&Handle>,
        task: Task,
        of: PassBuffers<'_>,
    ) {
        let segments = self.segments();
        let state_pass = self.plans.state_pass;
        let tiles = state_pass.value_slices();
        let (plan, across, deep) = match task.span {
            Span::Sequence => (state_pass, tiles, 1),
            Span::Segment => (state_pass, tiles, segments),
            Span::Local if task.backward => (state_pass, tiles * (segments - 1), 1),
            Span::Local => {
                let plan = self.plans.local_pass;
                let matrices = if self.variant.solves() { segments - 2 } else { 0 };
                let across = plan.value_slices() * (segments - 1) + plan.key_tiles() * matrices;
                (plan, across, 1)
            }
        };
        let plan = StatePlan { task, ..plan };
        let batch_heads = self.sequences() * self.dims.heads;
        let cubes = CubeCount::Static(across as u32, batch_heads as u32, deep as u32);
        match plan.in_registers() {
            true => self.launch_pass::<RegisterState>(scores, d_o, plan, cubes, of),
            false => self.launch_pass::<SharedMemoryState>(scores, d_o, plan, cubes, of),
        }
    }

    fn launch_pass<S: StatePlace>(
        &self,
        scores: &Scores<Handle>,
        d_o: Option<&Handle>,
        plan: StatePlan,
        cubes: CubeCount,
        of: PassBuffers<'_>,
    ) {
        let units = CubeDim::new_1d(plan.units as u32);
        let types = [self.dtype, self.plans.between];
        let values = self.values_shape().iter().product();
        // SAFETY: as in `intra_chunk`.
        #[allow(unsafe_code)]
        unsafe {
            match d_o {
                Some(d_o) => state_pass_backward::launch_unchecked::<S, R>(
                    self.client,
                    cubes,
                    units,
                    self.operands(),
                    self.read(scores),
                    of.launch(),
                    array(d_o, values),
                    whole(of.out),
                    self.sizes(),
                    plan,
                    types,
                    self.widths(plan.engine),
                ),
                None => state_pass_forward::launch_unchecked::<S, R>(
                    self.client,
                    cubes,
                    units,
                    self.operands(),
                    self.read(scores),
                    of.launch(),
                    whole(of.out),
                    self.sizes(),
                    plan,
                    types,
                    self.widths(plan.engine),
                ),
            }
        }
    }

    /// The initial state of each segment, `[B, H, P, K, V]`, forward or backward from `d_o`. `transitions` are
    /// filled forward; backward only where they are no matrices.
    fn initial_states(
        &self,
        scores: &Scores<Handle>,
        d_o: Option<&Handle>,
        given: Option<(&Handle, usize)>,
        save: bool,
        transitions: &Buffer,
    ) -> Buffer {
        let Dims { batch, heads, key_width, value_width, .. } = self.dims;
        let (plan, segments) = (self.plans.state_pass, self.segments());
        let backward = d_o.is_some();
        let states = self.buffer(&[batch, heads, segments, key_width, value_width], F32);
        let unused = self.buffer(&UNUSED, self.plans.between);
        let out = self.buffer(&UNUSED, self.dtype);
        let task = Task { backward, span: Span::Local, given: given.is_some(), save };
        let saved = [&unused, &unused];
        self.state_pass(
            scores,
            d_o,
            task,
            PassBuffers { start: given, end: &states, saved, transitions, out: &out },
        );
        if segments < 3 {
            return states;
        }
        let units = CubeDim::new_1d(UNITS as u32);
        let matrices = batch * heads * segments * key_width * key_width;
        // SAFETY: as in `intra_chunk`.
        #[allow(unsafe_code)]
        unsafe {
            if self.variant.solves() {
                combine_matrices::launch_unchecked::<R>(
                    self.client,
                    self.cubes(value_width.div_ceil(COLUMNS)),
                    units,
                    whole(transitions),
                    whole(&states),
                    if backward { matrices as u32 } else { 0 },
                    segments as u32,
                    backward,
                    *plan,
                    if key_width.is_multiple_of(4) { 4 } else { 1 },
                );
            } else {
                combine_decays::launch_unchecked::<R>(
                    self.client,
                    self.cubes((key_width * value_width).div_ceil(UNITS)),
                    units,
                    whole(transitions),
                    whole(&states),
                    segments as u32,
                    backward,
                    *plan,
                );
            }
        }
        states
    }

    /// Shape of the segments' transition matrices. A backward pass needs the matrices twice, as they are and
    /// transposed.
    fn transitions_shape(&self, save: bool) -> Vec<usize> {
        let Dims { batch, heads, key_width, .. } = self.dims;
        let segments = self.segments();
        match self.variant.decay {
            _ if segments == 1 => vec![16],
            _ if self.variant.solves() => {
                vec![1 + usize::from(save), batch, heads, segments, key_width, key_width]
            }
            crate::Decay::None => vec![16],
            crate::Decay::Scalar => vec![batch, heads, segments],
            crate::Decay::Vector => vec![batch, heads, segments, key_width],
        }
    }

    /// The state pass over all of every sequence, in one piece or in segments.
    fn pass_all(
        &self,
        scores: &Scores<Handle>,
        d_o: Option<&Handle>,
        given: Option<&Handle>,
        save: bool,
        of: PassBuffers<'_>,
    ) {
        let given = given.map(|given| (given, of.end.len()));
        let task =
            Task { backward: d_o.is_some(), span: Span::Sequence, given: given.is_some(), save };
        if self.segments() == 1 {
            self.state_pass(scores, d_o, task, PassBuffers { start: given, ..of });
        } else {
            let states = self.initial_states(scores, d_o, given, save, of.transitions);
            let task = Task { span: Span::Segment, given: true, ..task };
            self.state_pass(
                scores,
                d_o,
                task,
                PassBuffers { start: Some((&states.handle, states.len())), ..of },
            );
        }
    }

    /// The state pass forward.
    fn state_pass_forward(
        &self,
        scores: Scores<Buffer>,
        save: bool,
    ) -> (Buffer, Buffer, Saved<Buffer>) {
        let plan = self.plans.state_pass;
        let e = self.plans.between;
        let o = self.buffer(&self.values_shape(), self.dtype);
        let end = self.buffer(&self.state_shape(), F32);
        let states = self.own_shape(plan.value_width, plan.key_width);
        let saved = [
            self.buffer_if(save, &states, e),
            self.buffer_if(save && self.variant.solves(), &self.values_shape(), e),
        ];
        let transitions = self.buffer(&self.transitions_shape(save), F32);
        let of = PassBuffers {
            start: None,
            end: &end,
            saved: saved.each_ref(),
            transitions: &transitions,
            out: &o,
        };
        let handles = scores.handles();
        self.pass_all(&handles, None, self.x.state.as_ref(), save, of);
        let [states, block] = saved;
        (o, end, Saved { scores, states, block, transitions })
    }

    /// The state pass backward.
    fn state_pass_backward(
        &self,
        saved: &Saved<Handle>,
        d_o: &Handle,
        d_state: Option<&Handle>,
    ) -> PassGradients {
        let plan = self.plans.state_pass;
        let e = self.plans.between;
        let solves = self.variant.solves();
        let d_v = self.buffer_if(!self.variant.delta(), &self.values_shape(), self.dtype);
        let end = self.buffer(&self.state_shape(), F32);
        let states = self.own_shape(plan.value_width, plan.key_width);
        let written = [self.buffer(&states, e), self.buffer_if(solves, &self.values_shape(), e)];
        let shape = self.transitions_shape(true);
        let transitions = match solves {
            true => Buffer { handle: saved.transitions.clone(), shape, dtype: F32 },
            // They are of the segments of a local pass backward: others than forward.
            false => self.buffer(&shape, F32),
        };
        let of = PassBuffers {
            start: None,
            end: &end,
            saved: written.each_ref(),
            transitions: &transitions,
            out: &d_v,
        };
        self.pass_all(&saved.scores, Some(d_o), d_state, true, of);
        let [states, block] = written;
        PassGradients { v: d_v, start: end, states, block }
    }

    /// The input gradients.
    fn gradients(
        &self,
        saved: &Saved<Handle>,
        back: PassGradients,
        d_o: &Handle,
    ) -> GradientBuffers {
        let plan = self.plans.input_gradients;
        let (variant, e) = (self.variant, self.plans.between);
        let rows = self.rows_shape();
        let decays = variant.decay != crate::Decay::None;
        let of_g = if variant.vector() { rows.to_vec() } else { self.scalars_shape().to_vec() };
        let values = self.values_shape().iter().product();
        let out = GradientBuffers {
            q: self.buffer(&rows, self.dtype),
            k: self.buffer(&rows, self.dtype),
            a: self.buffer_if(variant.own_a(), &rows, self.dtype),
            b: self.buffer_if(variant.low_rank(), &rows, self.dtype),
            v: match variant.delta() {
                true => self.buffer(&self.values_shape(), self.dtype),
                false => back.v,
            },
            g: self.buffer_if(decays, &of_g, F32),
            beta: self.buffer_if(variant.delta(), &self.scalars_shape(), F32),
        };
        let blocks = if variant.solves() { values } else { 16 };
        let saved = SavedTensorsLaunch::new(
            array(d_o, values),
            array(&saved.block, blocks),
            array(&back.block.handle, blocks),
            array(&saved.states, back.states.len()),
            whole(&back.states),
        );
        let keys = self.keys_shape().iter().product();
        let of = |handle: &Option<Handle>| match handle {
            Some(handle) => array(handle, rows.iter().product()),
            None => array(&self.x.q, 16),
        };
        let pairs = RowPairsLaunch::new(
            array(&self.x.q, keys),
            array(&self.x.k, keys),
            of(&self.x.a),
            of(&self.x.b),
        );
        let launched = GradientsLaunch::new(
            whole(&out.q),
            whole(&out.k),
            whole(&out.a),
            whole(&out.b),
            whole(&out.v),
            whole(&out.g),
            whole(&out.beta),
        );
        // SAFETY: as in `intra_chunk`.
        #[allow(unsafe_code)]
        unsafe {
            input_gradients::launch_unchecked::<R>(
                self.client,
                self.cubes(self.chunks()),
                CubeDim::new_1d(plan.units as u32),
                self.operands(),
                pairs,
                saved,
                launched,
                self.sizes(),
                plan,
                [self.dtype, plan.engine.tile_type(e), e],
                self.stage_widths(&plan),
            );
        }
        out
    }
}

/// [`Chunkwise::new`] and [`Chunkwise::forward`].
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    x: &Inputs,
    save: bool,
) -> Result<Forward, Refusal> {
    check_tensors(variant, x)?;
    Ok(Chunkwise::new(client, variant, dims, dtype)?.forward(x, save))
}

/// [`Chunkwise::new`] and [`Chunkwise::backward`].
///
/// # Errors
/// As [`forward`].
/// # Panics
/// If `saved` is not what a forward pass of the same variant left.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    variant: Variant,
    dims: Dims,
    dtype: StorageType,
    given: Given<'_>,
) -> Result<Backward, Refusal> {
    check_tensors(variant, given.x)?;
    Ok(Chunkwise::new(client, variant, dims, dtype)?.backward(given))
}
