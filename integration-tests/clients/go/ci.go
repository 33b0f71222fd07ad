package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	artifacts "gantry.example/client/gen/gantry/artifacts/v1"
	runtime "gantry.example/client/gen/gantry/runtime/v1"
	scheduler "gantry.example/client/gen/gantry/scheduler/v1"
)

const (
	// A caller may send this many bytes of input more than the process has accepted.
	inputWindow = 1 << 20
	// Maximum number of repeats of a call that is not answered. They take two minutes.
	maxRepeats = 60
)

// repeat returns the result of a call, which is repeated while the service does not answer. A repeat is safe because the caller
// chooses all ids before the first call.
func repeat[T any](call func() (T, error)) (T, error) {
	for repeats := 0; ; repeats++ {
		answer, err := call()
		if err == nil || !waitAfter(err, repeats) {
			return answer, err
		}
	}
}

// waitAfter waits before the next repeat of a call that was not answered. It returns false for any other error.
func waitAfter(err error, repeats int) bool {
	code := status.Code(err)
	if code != codes.Unavailable && code != codes.DeadlineExceeded || repeats == maxRepeats {
		return false
	}
	time.Sleep(min(100*time.Millisecond<<min(repeats, 5), 2*time.Second))
	return true
}

// request repeats a call with one request and one answer.
func request[A, B any](ctx context.Context, call func(context.Context, A, ...grpc.CallOption) (B, error), message A) (B, error) {
	return repeat(func() (B, error) { return call(ctx, message) })
}

// renewed calls renew three times in each term until the returned function is called. A rejected renewal ends the loop. Then the
// next call under the lease or claim is rejected, too.
func renewed(term time.Duration, renew func() error) (stop func()) {
	ended := make(chan struct{})
	var loop sync.WaitGroup
	loop.Go(func() {
		ticks := time.NewTicker(term / 3)
		defer ticks.Stop()
		for {
			select {
			case <-ended:
				return
			case <-ticks.C:
			}
			if _, err := repeat(func() (struct{}, error) { return struct{}{}, renew() }); err != nil {
				return
			}
		}
	})
	return func() {
		close(ended)
		loop.Wait()
	}
}

// result is the end and the output of a process.
type result struct {
	exited      *runtime.Exited
	out         outputs
	connections int
}

func (r *result) succeeded() bool {
	code, ok := r.exited.GetStatus().(*runtime.Exited_Code)
	return ok && code.Code == 0
}

// stepFailed says that the main process of a step did not exit with 0.
type stepFailed struct {
	step string
	*result
}

func (f *stepFailed) Error() string {
	return fmt.Sprintf("%s ended with %v, stderr %q", f.step, f.exited, f.out.stderr)
}

// core has the services, and the settings that all steps share.
type core struct {
	*client
	artifacts artifacts.ArtifactsClient
	caches    artifacts.CachesClient
	// Artifact with a root file system. Empty: host workers run steps with their own programs.
	image string
	tags  []string
	// Whether a worker with these tags lets a task share the network of a service.
	hasServices bool
	// Artifact with the scripts of the resource type. Without an owner, it is deleted after 12 h.
	typeArtifact string
	typeDigest   []byte
}

func newCore(ctx context.Context) (*core, error) {
	client, err := newClient()
	if err != nil {
		return nil, err
	}
	store, err := client.dial(client.addresses["artifacts"])
	if err != nil {
		return nil, err
	}
	c := &core{
		client: client, artifacts: artifacts.NewArtifactsClient(store), caches: artifacts.NewCachesClient(store),
		image: os.Getenv("GANTRY_CI_IMAGE"), tags: strings.Fields(os.Getenv("GANTRY_CI_TAGS")),
		typeArtifact: uuid.NewString(),
	}
	scheduling, err := client.dial(client.addresses["scheduler"])
	if err != nil {
		return nil, err
	}
	known, err := request(ctx, scheduler.NewWorkersClient(scheduling).ListWorkers, &scheduler.ListWorkersRequest{})
	if err != nil {
		return nil, err
	}
	for _, worker := range known.Workers {
		tags := slices.Sorted(slices.Values(worker.Labels.GetTags()))
		isOurs := slices.Equal(tags, slices.Sorted(slices.Values(c.tags)))
		c.hasServices = c.hasServices || isOurs && slices.Contains(worker.Labels.GetCapabilities(), "network-container")
	}
	tree := &artifacts.SmallTree{}
	for _, name := range []string{"check", "in", "out"} {
		file := &artifacts.SmallTreeEntry_File{File: []byte(script(name))}
		tree.Entries = append(tree.Entries, &artifacts.SmallTreeEntry{Path: []byte(name), Content: file})
	}
	created, err := request(ctx, c.artifacts.CreateArtifact, &artifacts.CreateArtifactRequest{
		ArtifactId: c.typeArtifact, Team: c.team, Label: "counter", Tree: tree,
	})
	c.typeDigest = created.GetDigest()
	return c, err
}

// script returns a script of the resource type or of a task.
func script(name string) string {
	text, err := os.ReadFile("../ci/" + name)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// spec returns the spec of a container: inputs and caches by their paths, outputs by their names.
func (c *core) spec(inputs map[string]string, outputs []string, caches map[string]string) *runtime.ContainerSpec {
	spec := &runtime.ContainerSpec{
		Image:     &scheduler.Image{Source: &scheduler.Image_Host{Host: &scheduler.HostImage{}}},
		Privilege: scheduler.Privilege_PRIVILEGE_CONFINED,
		Network:   scheduler.Network_NETWORK_NONE,
	}
	if c.image != "" {
		spec.Image = &scheduler.Image{Source: &scheduler.Image_ArtifactId{ArtifactId: c.image}}
		spec.Network = scheduler.Network_NETWORK_PRIVATE
	}
	for _, path := range slices.Sorted(maps.Keys(inputs)) {
		spec.Inputs = append(spec.Inputs, &scheduler.Input{
			Name: strings.ReplaceAll(strings.Trim(path, "/"), "/", "-"), ArtifactId: inputs[path],
			Path: []byte(path), Access: scheduler.Access_ACCESS_READ_ONLY,
		})
	}
	for _, name := range outputs {
		spec.Outputs = append(spec.Outputs, &scheduler.Output{Name: name})
	}
	for _, path := range slices.Sorted(maps.Keys(caches)) {
		spec.Caches = append(spec.Caches, &scheduler.CacheMount{Path: []byte(path), TaskCacheId: caches[path]})
	}
	return spec
}

// lease is the right to run the container of one step on one worker.
type lease struct {
	*core
	token, worker, container string
	containers               runtime.ContainersClient
	settled                  bool
	// Stops the service of the step and returns its failure.
	stopService func() error
}

// leased leases a worker for one step, starts the service `serve` of the step if it has one, creates the container of the step, and
// runs it. The lease is renewed meanwhile. A step that does not settle the lease releases it, and nothing that it made is kept.
func (c *core) leased(
	ctx context.Context, kind scheduler.PlacementKind, spec *runtime.ContainerSpec, serve string, step func(*lease) error,
) (err error) {
	// They are pinned until the lease ends, and a worker that has them is preferred.
	var used, caches []string
	for _, input := range spec.Inputs {
		used = append(used, input.ArtifactId)
	}
	for _, cache := range spec.Caches {
		caches = append(caches, cache.TaskCacheId)
	}
	// Only workers that can run such a container are feasible.
	process := &scheduler.ProcessRequirements{ImageKind: "host", Capabilities: []string{"exec", "network-none"}}
	if c.image != "" {
		used = append(used, c.image)
		process.ImageKind = "artifact"
	}
	if serve != "" {
		spec.Network = scheduler.Network_NETWORK_PRIVATE
		process.Capabilities = append(process.Capabilities, "network-container")
	}
	if spec.Network == scheduler.Network_NETWORK_PRIVATE {
		process.Capabilities[1] = "network-private"
	}
	placed, err := request(ctx, c.placements.Place, &scheduler.PlaceRequest{
		LeaseId: uuid.NewString(), Team: c.team, Kind: kind, Tags: c.tags, Process: process,
		ArtifactIds: used, TaskCacheIds: caches, Wait: durationpb.New(10 * time.Minute),
	})
	if err != nil {
		return err
	}
	l := &lease{core: c, token: placed.LeaseToken, worker: placed.WorkerId}
	defer renewed(placed.Term.AsDuration(), func() error { return l.renew(ctx) })()
	defer func() {
		if !l.settled {
			_, released := request(ctx, c.placements.Release, &scheduler.ReleaseRequest{LeaseToken: l.token})
			err = errors.Join(err, released)
		}
	}()
	connection, err := c.gateway(placed.GatewayEndpoint)
	if err != nil {
		return err
	}
	defer connection.Close()
	l.containers = runtime.NewContainersClient(connection)
	if serve != "" {
		if err := l.serve(ctx, serve, spec); err != nil {
			return err
		}
	}
	if l.container, err = l.create(ctx, "step", spec); err != nil {
		return err
	}
	return step(l)
}

// serve runs a service in a container of its own, and lets the container with `spec` join its network. The first output of the
// service says that it is ready.
func (l *lease) serve(ctx context.Context, script string, spec *runtime.ContainerSpec) (err error) {
	service := *l
	own := l.spec(nil, nil, nil)
	own.Network = spec.Network
	if service.container, err = l.create(ctx, "service", own); err != nil {
		return err
	}
	heard, ended := make(chan struct{}), make(chan error, 1)
	ready := sync.OnceFunc(func() { close(heard) })
	go func() {
		said := func([]byte) error { ready(); return nil }
		result, err := service.run(ctx, process{command: []string{"perl", "-e", script}, heard: said}, nil)
		if err == nil && !result.succeeded() {
			err = &stepFailed{"service", result}
		}
		ended <- err
	}()
	select {
	case <-heard:
	case err := <-ended:
		return errors.Join(errors.New("the service ended early"), err)
	}
	spec.NetworkContainerId = service.container
	l.stopService = func() error {
		if err := service.stop(ctx); err != nil {
			return err
		}
		return <-ended
	}
	return nil
}

func (l *lease) renew(ctx context.Context) error {
	_, err := l.placements.Renew(ctx, &scheduler.RenewRequest{LeaseToken: l.token})
	return err
}

// create creates a container, and returns its id.
func (l *lease) create(ctx context.Context, key string, spec *runtime.ContainerSpec) (string, error) {
	message := &runtime.CreateContainerRequest{LeaseToken: l.token, Key: key, Spec: spec}
	return repeat(func() (string, error) {
		call, err := l.containers.CreateContainer(ctx, message)
		for err == nil {
			var answer *runtime.CreateContainerResponse
			// Progress comes before the container.
			if answer, err = call.Recv(); answer.GetCreated() != nil {
				return answer.GetCreated().ContainerId, nil
			}
		}
		return "", err
	})
}

// publish publishes an output or a task cache after the end of the main process, and returns the candidate.
func (l *lease) publish(ctx context.Context, message *runtime.PublishRequest) (*runtime.Published, error) {
	message.LeaseToken, message.ContainerId = l.token, l.container
	return repeat(func() (*runtime.Published, error) {
		call, err := l.containers.Publish(ctx, message)
		for err == nil {
			var answer *runtime.PublishResponse
			if answer, err = call.Recv(); answer.GetPublished() != nil {
				return answer.GetPublished(), nil
			}
		}
		return nil, err
	})
}

// stop sends TERM to the processes of the container, and KILL after 10 s. Their ends are reported as usual.
func (l *lease) stop(ctx context.Context) error {
	_, err := request(ctx, l.containers.StopContainer, &runtime.StopContainerRequest{LeaseToken: l.token, ContainerId: l.container})
	return err
}

// settle ends the lease. The named candidates become artifacts, and everything else is deleted.
func (l *lease) settle(ctx context.Context, kept []*scheduler.SettledArtifact, build string, succeeded bool) error {
	settlement := &scheduler.Settlement{Artifacts: kept, BuildId: build, Status: scheduler.Outcome_OUTCOME_FAILED}
	if succeeded {
		settlement.Status = scheduler.Outcome_OUTCOME_SUCCEEDED
	}
	released, err := request(ctx, l.placements.Release, &scheduler.ReleaseRequest{LeaseToken: l.token, Settlement: settlement})
	if err != nil {
		return err
	}
	l.settled = true
	if len(released.Missing) > 0 {
		return fmt.Errorf("owners are missing: %v", released.Missing)
	}
	return nil
}

// owned returns an artifact of a settlement: owned by the owner only, or by the build if there is none.
func owned(candidate *runtime.Published, label string, owner *scheduler.OutputOwner) *scheduler.SettledArtifact {
	artifact := &scheduler.SettledArtifact{ArtifactId: candidate.ArtifactId, Digest: candidate.Digest, Label: label}
	if owner != nil {
		artifact.Owners, artifact.ForOwnersOnly = []*scheduler.OutputOwner{owner}, true
	}
	return artifact
}

// process is a process to start, and what a test does meanwhile.
type process struct {
	id, token string
	command   []string
	stdin     []byte
	// The first call is broken after this much output. 0: it is not broken.
	breakAfter int
	// It is called with the standard output so far.
	heard func(stdout []byte) error
}

// run runs the main process of the container, with a JSON document as its input.
func (l *lease) run(ctx context.Context, p process, document any) (*result, error) {
	p.id, p.token = l.container, l.token
	if document != nil {
		var err error
		if p.stdin, err = json.Marshal(document); err != nil {
			return nil, err
		}
	}
	ended, err := l.drive(ctx, p)
	if err == nil && !ended.succeeded() {
		// A process also ends when its lease is lost. Then this call is rejected with LEASE_LOST.
		_, err = repeat(func() (struct{}, error) { return struct{}{}, l.renew(ctx) })
	}
	if err == nil && ended.exited.GetReason() != "" {
		err = fmt.Errorf("the process has no exit: %v", ended.exited)
	}
	return ended, err
}

// exec runs a further process in the running container.
func (l *lease) exec(ctx context.Context, command []string, stdin []byte) (*result, error) {
	return l.drive(ctx, process{id: uuid.NewString(), command: command, stdin: stdin})
}

// drive starts a process, sends its input, and returns its whole output and its end. Broken calls are resumed.
func (l *lease) drive(ctx context.Context, p process) (*result, error) {
	spec := &runtime.ProcessSpec{Stdin: len(p.stdin) > 0}
	for _, word := range p.command {
		spec.Command = append(spec.Command, []byte(word))
	}
	// It is repeated until it is answered. A process that exists is attached to, and not started again.
	first := &runtime.AttachRequest{Message: &runtime.AttachRequest_Start{Start: &runtime.StartProcess{
		Team: l.team, WorkerId: l.worker, ContainerId: l.container, ProcessId: p.id, Spec: spec, LeaseToken: p.token,
	}}}
	r := &result{}
	for repeats := 0; ; repeats++ {
		r.connections++
		answered, done, err := l.attach(ctx, p, first, r)
		if done {
			return r, nil
		}
		if answered {
			// From here on, the process exists. `resume` continues at the received offsets.
			first = &runtime.AttachRequest{Message: &runtime.AttachRequest_Resume{Resume: &runtime.Resume{
				Team: l.team, WorkerId: l.worker, ProcessId: p.id,
				StdoutOffset: uint64(len(r.out.stdout)), StderrOffset: uint64(len(r.out.stderr)),
			}}}
			repeats = 0
		}
		if err != nil && !errors.Is(err, io.EOF) && !waitAfter(err, repeats) {
			return nil, err
		}
	}
}

// attach makes one call of drive.
func (l *lease) attach(ctx context.Context, p process, first *runtime.AttachRequest, r *result) (answered, done bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // Breaks a running call.
	call, err := l.containers.Attach(ctx)
	if err != nil {
		return false, false, err
	}
	// Send returns io.EOF when the call has ended. Recv returns the reason.
	send := func(message *runtime.AttachRequest) { call.Send(message) }
	send(first)
	var written uint64
	closed := len(p.stdin) == 0
	for p.breakAfter == 0 || r.connections > 1 || len(r.out.stdout) < p.breakAfter {
		said, err := call.Recv()
		if err != nil {
			return answered, false, err
		}
		answered = true
		switch said := said.Message.(type) {
		case *runtime.AttachResponse_Started:
			written = said.Started.StdinOffset
			written, closed = write(send, p.stdin, written, written, closed)
		case *runtime.AttachResponse_StdinAck:
			written, closed = write(send, p.stdin, written, said.StdinAck.Offset, closed)
		case *runtime.AttachResponse_Output:
			output := &r.out.stdout
			if said.Output.Stream == runtime.Stream_STREAM_STDERR {
				output = &r.out.stderr
			}
			if said.Output.Offset != uint64(len(*output)) {
				return true, false, errors.New("out of order")
			}
			*output = append(*output, said.Output.Data...)
			// Without an acknowledgement, the process blocks after 32 MiB.
			offsets := &runtime.Ack{StdoutOffset: uint64(len(r.out.stdout)), StderrOffset: uint64(len(r.out.stderr))}
			send(&runtime.AttachRequest{Message: &runtime.AttachRequest_Ack{Ack: offsets}})
			if p.heard != nil {
				if err := p.heard(r.out.stdout); err != nil {
					return true, false, err
				}
			}
		case *runtime.AttachResponse_Truncated:
			return true, false, fmt.Errorf("output is lost: %v", said.Truncated)
		case *runtime.AttachResponse_Exited:
			r.exited = said.Exited
		case *runtime.AttachResponse_Done:
			return true, true, nil
		}
	}
	return true, false, nil
}

// write sends input beyond `written` within the window, and closes the input at its end. It returns how much is sent.
func write(send func(*runtime.AttachRequest), stdin []byte, written, accepted uint64, closed bool) (uint64, bool) {
	if closed {
		return written, true
	}
	for end := min(uint64(len(stdin)), accepted+inputWindow); written < end; {
		data := stdin[written:min(written+64<<10, end)]
		send(&runtime.AttachRequest{Message: &runtime.AttachRequest_Stdin{Stdin: &runtime.StdinData{Offset: written, Data: data}}})
		written += uint64(len(data))
	}
	if written == uint64(len(stdin)) {
		send(&runtime.AttachRequest{Message: &runtime.AttachRequest_CloseStdin{CloseStdin: &runtime.CloseStdin{}}})
		closed = true
	}
	return written, closed
}

// build is one run of the pipeline. It owns the artifacts of its steps until it ends.
type build struct {
	*core
	put *artifacts.PutBuildRequest
}

// build runs the steps of a build, which is renewed meanwhile. Without a renewal, for example after a crash of the core, the build
// ends as aborted after its term.
func (c *core) build(ctx context.Context, job string, number uint64, steps func(*build) error) error {
	term := time.Minute
	b := &build{core: c, put: &artifacts.PutBuildRequest{
		BuildId: uuid.NewString(), Team: c.team, Job: job, Number: number, Term: durationpb.New(term),
	}}
	if _, err := request(ctx, c.owners.PutBuild, b.put); err != nil {
		return err
	}
	stop := renewed(term, func() error { _, err := c.owners.PutBuild(ctx, b.put); return err })
	err := steps(b)
	stop()
	b.put.Status = artifacts.BuildStatus_BUILD_STATUS_SUCCEEDED
	if failed := new(stepFailed); errors.As(err, &failed) {
		b.put.Status = artifacts.BuildStatus_BUILD_STATUS_FAILED
	} else if err != nil {
		b.put.Status = artifacts.BuildStatus_BUILD_STATUS_ERRORED
	}
	_, ended := request(ctx, c.owners.PutBuild, b.put)
	return errors.Join(err, ended)
}

type version = map[string]string

// document is the input and the output of a resource.
type document struct {
	Source  map[string]any `json:"source,omitempty"`
	Version version        `json:"version"`
}

// resource runs a script of the resource type, and decodes its output.
func (l *lease) resource(ctx context.Context, name string, arguments []string, input document, output any) error {
	command := append([]string{"sh", "/opt/resource/" + name}, arguments...)
	ended, err := l.run(ctx, process{command: command}, input)
	if err != nil {
		return err
	}
	if !ended.succeeded() {
		return &stepFailed{name, ended}
	}
	return json.Unmarshal(ended.out.stdout, output)
}

// check returns the versions of the resource from a version on, oldest first.
func (b *build) check(ctx context.Context, source map[string]any, from version) (versions []version, err error) {
	spec := b.spec(map[string]string{"/opt/resource": b.typeArtifact}, nil, nil)
	err = b.leased(ctx, scheduler.PlacementKind_PLACEMENT_KIND_CHECK, spec, "", func(l *lease) error {
		return l.resource(ctx, "check", nil, document{source, from}, &versions)
	})
	return versions, err
}

// get returns the artifact of a version, and whether this build made it. Builds that need the same version at the same time get
// the same artifact, which a single one of them makes.
func (b *build) get(ctx context.Context, source map[string]any, of version) (artifact string, made bool, err error) {
	key, err := json.Marshal([]any{"counter", hex.EncodeToString(b.typeDigest), source, of})
	if err != nil {
		return "", false, err
	}
	digest, claim := sha256.Sum256(key), uuid.NewString()
	message := &artifacts.FindOrCreateResourceCacheRequest{
		Team: b.team, KeyDigest: digest[:], ClaimId: claim, Type: "counter", Version: fmt.Sprint(of),
		// The build keeps the cache until it ends.
		User: &artifacts.CacheUser{User: &artifacts.CacheUser_BuildId{BuildId: b.put.BuildId}},
	}
	found, err := request(ctx, b.caches.FindOrCreateResourceCache, message)
	for err == nil && found.GetInProgress() != nil {
		time.Sleep(time.Second)
		found, err = request(ctx, b.caches.FindOrCreateResourceCache, message)
	}
	if err != nil {
		return "", false, err
	}
	if ready := found.GetReady(); ready != nil {
		return ready.ArtifactId, false, nil
	}
	defer renewed(found.GetClaimed().Term.AsDuration(), func() error {
		_, err := b.caches.RenewResourceCache(ctx, &artifacts.RenewResourceCacheRequest{Team: b.team, ClaimId: claim})
		return err
	})()
	spec := b.spec(map[string]string{"/opt/resource": b.typeArtifact}, []string{"version"}, nil)
	err = b.leased(ctx, scheduler.PlacementKind_PLACEMENT_KIND_GET, spec, "", func(l *lease) error {
		var got document
		if err := l.resource(ctx, "in", []string{"/workspace/version"}, document{source, of}, &got); err != nil {
			return err
		}
		if !maps.Equal(got.Version, of) {
			return fmt.Errorf("another version: %v", got.Version)
		}
		published, err := l.publish(ctx, &runtime.PublishRequest{Source: &runtime.PublishRequest_Output{Output: "version"}})
		if err != nil {
			return err
		}
		artifact = published.ArtifactId
		// The cache owns the artifact, so it outlives the build.
		owner := &scheduler.OutputOwner{Owner: &scheduler.OutputOwner_ResourceCacheClaimId{ResourceCacheClaimId: claim}}
		return l.settle(ctx, []*scheduler.SettledArtifact{owned(published, "version", owner)}, "", true)
	})
	return artifact, true, err
}

// task is a step that runs a command with inputs, outputs and caches.
type task struct {
	name, script string
	// Script of the service beside the task. Empty: the task has none.
	serve      string
	inputs     map[string]string
	outputs    []string
	cachePaths []string
	breakAfter int
	beside     func(l *lease, stdout []byte) error
}

// task runs a command, and returns its result and the artifacts of its outputs. Outputs and caches of a command that fails are
// kept, too.
func (b *build) task(ctx context.Context, t task) (ended *result, made map[string]string, err error) {
	caches := map[string]string{}
	for _, path := range t.cachePaths {
		found, err := request(ctx, b.caches.FindOrCreateTaskCache, &artifacts.FindOrCreateTaskCacheRequest{
			Team: b.team, Job: b.put.Job, Step: t.name, Path: path,
		})
		if err != nil {
			return nil, nil, err
		}
		caches[path] = found.CacheId
	}
	made = map[string]string{}
	err = b.leased(ctx, scheduler.PlacementKind_PLACEMENT_KIND_TASK, b.spec(t.inputs, t.outputs, caches), t.serve, func(l *lease) error {
		heard := func(stdout []byte) error {
			if t.beside == nil {
				return nil
			}
			return t.beside(l, stdout)
		}
		command := []string{"sh", "-c", t.script, "task"}
		if t.serve != "" {
			command = append(command, "5432")
		}
		if ended, err = l.run(ctx, process{command: command, breakAfter: t.breakAfter, heard: heard}, nil); err != nil {
			return err
		}
		if l.stopService != nil {
			if err := l.stopService(); err != nil {
				return err
			}
		}
		var kept []*scheduler.SettledArtifact
		for _, output := range t.outputs {
			published, err := l.publish(ctx, &runtime.PublishRequest{Source: &runtime.PublishRequest_Output{Output: output}})
			if err != nil {
				return err
			}
			made[output] = published.ArtifactId
			kept = append(kept, owned(published, output, nil))
		}
		for _, cache := range caches {
			published, err := l.publish(ctx, &runtime.PublishRequest{Source: &runtime.PublishRequest_TaskCacheId{TaskCacheId: cache}})
			if err != nil {
				return err
			}
			// An unchanged cache has no candidate.
			if published.ArtifactId != "" {
				owner := &scheduler.OutputOwner{Owner: &scheduler.OutputOwner_TaskCacheId{TaskCacheId: cache}}
				kept = append(kept, owned(published, "", owner))
			}
		}
		return l.settle(ctx, kept, b.put.BuildId, ended.succeeded())
	})
	if err == nil && !ended.succeeded() {
		err = &stepFailed{t.name, ended}
	}
	return ended, made, err
}

// putVersion puts the inputs, which are directories below the working directory, and returns the new version.
func (b *build) putVersion(ctx context.Context, source map[string]any, inputs map[string]string) (version, error) {
	all := maps.Clone(inputs)
	all["/opt/resource"] = b.typeArtifact
	var put document
	err := b.leased(ctx, scheduler.PlacementKind_PLACEMENT_KIND_PUT, b.spec(all, nil, nil), "", func(l *lease) error {
		return l.resource(ctx, "out", []string{"/workspace"}, document{Source: source}, &put)
	})
	return put.Version, err
}

func check(condition bool, format string, arguments ...any) error {
	if condition {
		return nil
	}
	return fmt.Errorf(format, arguments...)
}

// built is what a build made.
type built struct {
	version, result string
	made            bool
	runs            int
}

// pipeline runs the steps of one build.
func (b *build) pipeline(ctx context.Context, source map[string]any) (made built, err error) {
	versions, err := b.check(ctx, source, version{"number": "2"})
	if err != nil {
		return made, err
	}
	if len(versions) != 2 || versions[1]["number"] != "3" {
		return made, fmt.Errorf("other versions: %v", versions)
	}
	if made.version, made.made, err = b.get(ctx, source, versions[1]); err != nil {
		return made, err
	}
	fmt.Printf("build %d: version 3: %s, made %v\n", b.put.Number, made.version, made.made)

	var beside *result
	// The process beside the task reads more than one window of input.
	input := bytes.Repeat([]byte("input 0000000\n"), 3<<16)
	serve, served := "", ""
	if b.hasServices {
		serve, served = script("service"), "served\n"
	}
	ended, outputs, err := b.task(ctx, task{
		name: "unit", script: script("task"), serve: serve, inputs: map[string]string{"version": made.version},
		outputs: []string{"result"}, cachePaths: []string{"/cache"}, breakAfter: breakAfter,
		beside: func(l *lease, stdout []byte) (err error) {
			if beside == nil && bytes.HasPrefix(stdout, []byte("ready\n")) {
				beside, err = l.exec(ctx, []string{"sh", "-c", script("beside")}, input)
			}
			return err
		},
	})
	if err != nil {
		return made, err
	}
	made.result = outputs["result"]
	files, err := repeat(func() (map[string][]byte, error) {
		files, _, err := b.download(ctx, made.result)
		return files, err
	})
	if err != nil {
		return made, err
	}
	put, err := b.putVersion(ctx, source, map[string]string{"result": made.result})
	if err != nil {
		return made, err
	}

	var lines bytes.Buffer
	for line := range 40_000 {
		fmt.Fprintf(&lines, "line %06d of version 3\n", line+1)
	}
	sum, inputSum := sha256.Sum256(lines.Bytes()), sha256.Sum256(input)
	_, err = fmt.Sscan(string(files["runs"]), &made.runs)
	fmt.Printf("build %d: task ran for the %d. time, result %s\n", b.put.Number, made.runs, made.result)
	return made, errors.Join(
		err,
		check(string(ended.out.stdout) == "ready\n"+lines.String() && string(ended.out.stderr) == "done\n", "not each byte once, in order"),
		check(ended.connections > 1, "the call was not broken"),
		check(beside.exited.GetCode() == 3, "other end: %v", beside.exited),
		check(string(beside.out.stdout) == hex.EncodeToString(inputSum[:])+"  -\n", "other input: %s", beside.out.stdout),
		check(bytes.Equal(files["lines"], lines.Bytes()), "other bytes than the task wrote"),
		check(string(files["served"]) == served, "another line than that of the service: %q", files["served"]),
		check(put["sha256"] == hex.EncodeToString(sum[:]), "other version: %v", put),
	)
}

// keptBy returns the lines that describe what keeps an artifact. There are none if the artifact is deleted.
func (c *core) keptBy(ctx context.Context, artifact string) (string, error) {
	found, err := request(ctx, c.artifacts.GetArtifact, &artifacts.GetArtifactRequest{Team: c.team, ArtifactId: artifact})
	if errorInfo(err).GetReason() == "ARTIFACT_NOT_FOUND" {
		return "", nil
	}
	return strings.Join(found.GetArtifact().GetKeptBy(), "\n"), err
}

// failure runs a build whose step fails, and returns the result of the step.
func (c *core) failure(ctx context.Context, job string, number uint64, step func(*build) error) (*result, error) {
	err := c.build(ctx, job, number, step)
	if failed := new(stepFailed); errors.As(err, &failed) {
		return failed.result, nil
	}
	return nil, fmt.Errorf("the step did not fail: %w", err)
}

// runCore runs builds that check a resource, get its newest version, run a task and put the result. Each step leases a worker and
// drives a container on it. docs/ci-core.md explains each part.
func runCore(ctx context.Context) error {
	c, err := newCore(ctx)
	if err != nil {
		return err
	}
	if !c.hasServices {
		fmt.Println("the task has no service: its worker cannot join networks")
	}
	// Each run of this program has a job and a resource of its own.
	job, source := "ci-core-"+uuid.NewString(), map[string]any{"newest": 3, "run": uuid.NewString()}
	var made [3]built
	run := func(index int) error {
		return c.build(ctx, job, uint64(index+1), func(b *build) (err error) {
			made[index], err = b.pipeline(ctx, source)
			return err
		})
	}
	errs := make([]error, 2)
	var both sync.WaitGroup
	for index := range errs {
		both.Go(func() { errs[index] = run(index) })
	}
	both.Wait()
	if err := errors.Join(append(errs, run(2))...); err != nil {
		return err
	}

	missing, err := c.failure(ctx, job, 4, func(b *build) error {
		_, err := b.check(ctx, map[string]any{"run": source["run"]}, nil)
		return err
	})
	if err != nil {
		return err
	}
	stopped, err := c.failure(ctx, job, 5, func(b *build) error {
		stop := func(l *lease, _ []byte) error { return l.stop(ctx) }
		_, _, err := b.task(ctx, task{name: "endless", script: script("endless"), beside: stop})
		return err
	})
	if err != nil {
		return err
	}

	version, err := c.keptBy(ctx, made[0].version)
	errs = []error{
		err,
		check(made[0].version == made[1].version && made[0].version == made[2].version, "all builds use one artifact"),
		check(made[0].made != made[1].made && !made[2].made, "one build makes it"),
		check(made[2].runs == 1+max(made[0].runs, made[1].runs), "the third build finds the task cache"),
		check(missing.exited.GetCode() == 4 && string(missing.out.stderr) == "source.newest is missing\n", "%v", missing),
		check(stopped.exited.GetCode() == 7 && string(stopped.out.stdout) == "ready\nstopped\n", "%v", stopped),
		// The version stays for later builds.
		check(strings.Contains(version, "resource cache "), "the version is kept by %s", version),
	}
	for _, one := range made {
		// The builds have let go of their results, which are deleted with the last container that used them.
		kept, err := c.keptBy(ctx, one.result)
		errs = append(errs, err, check(!strings.Contains(kept, "build ") && !strings.Contains(kept, "pinned "), "a result is kept by %s", kept))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	fmt.Println("ci core: 5 builds, ok")
	return nil
}
