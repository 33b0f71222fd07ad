// Uploads a directory, runs a command that copies it and writes output, follows the command, and downloads the copy. docs/clients.md explains each step.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"os"
	"strings"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	artifacts "gantry.example/client/gen/gantry/artifacts/v1"
	runtime "gantry.example/client/gen/gantry/runtime/v1"
	scheduler "gantry.example/client/gen/gantry/scheduler/v1"
	streamer "gantry.example/client/gen/gantry/streamer/v1"
)

const breakAfter = 100_000

// More output than a worker keeps without acknowledgement. A caller that does not acknowledge standard error waits forever.
const errorBytes = 40 << 20

type client struct {
	team      string
	addresses map[string]string
	dial      func(address string) (*grpc.ClientConn, error)

	workloads  scheduler.WorkloadsClient
	placements scheduler.PlacementsClient
	owners     artifacts.OwnersClient
	streamer   streamer.StreamerClient
}

// docs:connect

// addresses parses GANTRY_SERVER: one address for all services, or `scheduler=…,artifacts=…,streamer=…,proxy=…`.
func addresses() map[string]string {
	server := os.Getenv("GANTRY_SERVER")
	if !strings.Contains(server, "=") {
		return map[string]string{"scheduler": server, "artifacts": server, "streamer": server, "proxy": server}
	}
	found := map[string]string{}
	for part := range strings.SplitSeq(server, ",") {
		service, address, _ := strings.Cut(part, "=")
		found[service] = address
	}
	return found
}

func dialer() (func(address string) (*grpc.ClientConn, error), error) {
	retries, err := os.ReadFile("../../../proto/service-config.json")
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(string(retries)),
	}
	if file := os.Getenv("GANTRY_TOKEN_FILE"); file != "" {
		token, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithPerRPCCredentials(bearer(strings.TrimSpace(string(token)))))
	}
	return func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient(strings.TrimPrefix(address, "http://"), options...)
	}, nil
}

// bearer is the cluster token, which every call carries.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// docs:end

func newClient() (*client, error) {
	dial, err := dialer()
	if err != nil {
		return nil, err
	}
	c := &client{team: "main", addresses: addresses(), dial: dial}
	if team := os.Getenv("GANTRY_TEAM"); team != "" {
		c.team = team
	}
	connections := map[string]*grpc.ClientConn{}
	for _, service := range []string{"scheduler", "artifacts", "streamer"} {
		if connections[service], err = dial(c.addresses[service]); err != nil {
			return nil, err
		}
	}
	c.workloads = scheduler.NewWorkloadsClient(connections["scheduler"])
	c.placements = scheduler.NewPlacementsClient(connections["scheduler"])
	c.owners = artifacts.NewOwnersClient(connections["artifacts"])
	c.streamer = streamer.NewStreamerClient(connections["streamer"])
	return c, nil
}

// gateway connects to the gateway of a worker, or to the proxy if there is one.
func (c *client) gateway(endpoint string) (*grpc.ClientConn, error) {
	if proxy, ok := c.addresses["proxy"]; ok {
		endpoint = proxy
	}
	return c.dial(endpoint)
}

// docs:upload
func (c *client) upload(ctx context.Context, directory, build string) (artifact string, digest []byte, err error) {
	call, err := c.streamer.Upload(ctx)
	if err != nil {
		return "", nil, err
	}
	open := &streamer.UploadOpen{Team: c.team, ArtifactId: uuid.NewString(), BuildId: build, Label: "src"}
	if err := call.Send(&streamer.UploadRequest{Message: &streamer.UploadRequest_Open{Open: open}}); err != nil {
		return "", nil, err
	}
	answer, err := call.Recv()
	if err != nil {
		return "", nil, err
	}

	written, err := c.writeArchive(ctx, directory, answer.GetEndpoint())
	if err != nil {
		return "", nil, err
	}

	// Without the commit, the upload has no effect.
	commit := &streamer.UploadCommit{Digest: written.Digest}
	if err := call.Send(&streamer.UploadRequest{Message: &streamer.UploadRequest_Commit{Commit: commit}}); err != nil {
		return "", nil, err
	}
	if answer, err = call.Recv(); err != nil {
		return "", nil, err
	}
	return answer.GetUploaded().ArtifactId, written.Digest, call.CloseSend()
}

func (c *client) writeArchive(ctx context.Context, directory string, endpoint *streamer.TransferEndpoint) (*runtime.WriteArchiveResponse, error) {
	connection, err := c.gateway(endpoint.GatewayEndpoint)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	call, err := runtime.NewVolumesClient(connection).WriteArchive(ctx)
	if err != nil {
		return nil, err
	}
	open := &runtime.WriteArchiveRequest_Open{Open: &runtime.WriteOpen{Ticket: endpoint.Ticket}}
	if err := call.Send(&runtime.WriteArchiveRequest{Message: open}); err != nil {
		return nil, err
	}
	archive := tar.NewWriter(chunks(func(data []byte) error {
		return call.Send(&runtime.WriteArchiveRequest{Message: &runtime.WriteArchiveRequest_Data{Data: data}})
	}))
	err = errors.Join(archive.AddFS(os.DirFS(directory)), archive.Close())
	if err == nil {
		commit := &runtime.WriteArchiveRequest_Commit{Commit: &runtime.WriteCommit{}}
		err = call.Send(&runtime.WriteArchiveRequest{Message: commit})
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	// Send returns io.EOF when the call has ended. CloseAndRecv returns the reason.
	return call.CloseAndRecv()
}

// docs:end

type chunks func(data []byte) error

func (c chunks) Write(data []byte) (int, error) { return len(data), c(data) }

// docs:submit
func (c *client) spec(artifact, build string, tags ...string) *scheduler.WorkloadSpec {
	script := "cp -a src/. out && head -c 40M /dev/zero >&2 && seq -f 'line %06.0f' 0 39999"
	return &scheduler.WorkloadSpec{
		Team:      c.team,
		Kind:      scheduler.WorkloadKind_WORKLOAD_KIND_TASK,
		Image:     &scheduler.Image{Source: &scheduler.Image_Host{Host: &scheduler.HostImage{}}},
		Command:   [][]byte{[]byte("sh"), []byte("-c"), []byte(script)},
		Stdin:     scheduler.StdinMode_STDIN_MODE_NONE,
		Output:    scheduler.OutputMode_OUTPUT_MODE_ATTACHED,
		Inputs:    []*scheduler.Input{{Name: "src", ArtifactId: artifact, Access: scheduler.Access_ACCESS_READ_ONLY}},
		Outputs:   []*scheduler.Output{{Name: "out"}},
		Privilege: scheduler.Privilege_PRIVILEGE_CONFINED,
		Network:   scheduler.Network_NETWORK_NONE,
		Tags:      tags,
		BuildId:   build,
	}
}

func (c *client) submit(ctx context.Context, workload string, spec *scheduler.WorkloadSpec) error {
	_, err := c.workloads.Submit(ctx, &scheduler.SubmitRequest{WorkloadId: workload, Spec: spec})
	return err
}

// docs:end

// docs:watch

// watch follows a workload until a wanted event. It returns the revision from which the next call resumes.
func (c *client) watch(
	ctx context.Context, workload string, after uint64, wanted func(*scheduler.WatchResponse) bool,
) (*scheduler.WatchResponse, error) {
	request := &scheduler.WatchRequest{Team: c.team, WorkloadId: workload, AfterRevision: after}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := c.workloads.Watch(ctx, request)
	if err != nil {
		return nil, err
	}
	for {
		event, err := call.Recv()
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(fmt.Sprintf("%T", event.Event), "*schedulerv1.WatchResponse_")
		fmt.Printf("watched: %s\n", strings.ToLower(name))
		if wanted(event) {
			return event, nil
		}
		if finished := event.GetFinished(); finished != nil {
			return nil, fmt.Errorf("ended early: %v", finished)
		}
	}
}

// docs:end

// docs:attach

// outputs has the output of a process.
type outputs struct{ stdout, stderr []byte }

// attach returns both outputs completely. Its connection breaks once.
func (c *client) attach(ctx context.Context, at *scheduler.AttemptLocation) (all outputs, connections int, err error) {
	for done := false; !done && err == nil; {
		connections++
		done, err = c.attachOnce(ctx, at, &all, connections == 1)
	}
	return all, connections, err
}

func (c *client) attachOnce(ctx context.Context, at *scheduler.AttemptLocation, all *outputs, breaks bool) (done bool, err error) {
	connection, err := c.gateway(at.GatewayEndpoint)
	if err != nil {
		return false, err
	}
	defer connection.Close() // Also breaks the running call.
	call, err := runtime.NewContainersClient(connection).Attach(ctx)
	if err != nil {
		return false, err
	}
	resume := &runtime.Resume{
		Team: c.team, WorkerId: at.WorkerId, ProcessId: at.AttemptId,
		StdoutOffset: uint64(len(all.stdout)), StderrOffset: uint64(len(all.stderr)),
	}
	if err := call.Send(&runtime.AttachRequest{Message: &runtime.AttachRequest_Resume{Resume: resume}}); err != nil {
		return false, err
	}
	for !breaks || len(all.stdout) < breakAfter {
		said, err := call.Recv()
		if err != nil {
			return false, err
		}
		switch said := said.Message.(type) {
		case *runtime.AttachResponse_Output:
			output := &all.stdout
			if said.Output.Stream == runtime.Stream_STREAM_STDERR {
				output = &all.stderr
			}
			if said.Output.Offset != uint64(len(*output)) {
				return false, errors.New("out of order")
			}
			*output = append(*output, said.Output.Data...)
			// Acknowledge both outputs, even if one is discarded. The worker then drops the bytes, and the process continues.
			offsets := &runtime.Ack{StdoutOffset: uint64(len(all.stdout)), StderrOffset: uint64(len(all.stderr))}
			ack := &runtime.AttachRequest{Message: &runtime.AttachRequest_Ack{Ack: offsets}}
			if err := call.Send(ack); err != nil && !errors.Is(err, io.EOF) {
				return false, err
			}
		case *runtime.AttachResponse_Done:
			return true, nil
		}
	}
	return false, nil
}

// docs:end

// docs:download
func (c *client) download(ctx context.Context, artifact string) (files map[string][]byte, digest []byte, err error) {
	found, err := c.streamer.Download(ctx, &streamer.DownloadRequest{Team: c.team, ArtifactId: artifact})
	if err != nil {
		return nil, nil, err
	}
	connection, err := c.gateway(found.Endpoint.GatewayEndpoint)
	if err != nil {
		return nil, nil, err
	}
	defer connection.Close()
	request := &runtime.ReadArchiveRequest{Ticket: found.Endpoint.Ticket}
	call, err := runtime.NewVolumesClient(connection).ReadArchive(ctx, request)
	if err != nil {
		return nil, nil, err
	}
	var content bytes.Buffer
	for digest == nil {
		part, err := call.Recv()
		if err != nil {
			return nil, nil, err // Also io.EOF, because a stream without `done` was cut off.
		}
		content.Write(part.GetData())
		digest = part.GetDone().GetDigest()
	}
	if !bytes.Equal(digest, found.Digest) {
		return nil, nil, errors.New("other bytes than were announced")
	}
	files = map[string][]byte{}
	for archive := tar.NewReader(&content); ; {
		entry, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, digest, nil
		}
		if err != nil {
			return nil, nil, err
		}
		name := strings.TrimPrefix(entry.Name, "./")
		switch entry.Typeflag {
		case tar.TypeReg:
			if files[name], err = io.ReadAll(archive); err != nil {
				return nil, nil, err
			}
		case tar.TypeSymlink:
			files[name] = []byte("-> " + entry.Linkname)
		}
	}
}

// docs:end

// docs:refused

// errorInfo returns the reason of an error, as listed in docs/errors.md.
func errorInfo(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil // The error does not come from Gantry.
}

// docs:end

// readAll returns files with their contents, and symbolic links as `-> target`.
func readAll(directory string) (map[string][]byte, error) {
	files, root := map[string][]byte{}, os.DirFS(directory)
	return files, fs.WalkDir(root, ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			files[path], err = fs.ReadFile(root, path)
		}
		if err == nil && entry.Type() == fs.ModeSymlink {
			var target string
			target, err = fs.ReadLink(root, path)
			files[path] = []byte("-> " + target)
		}
		return err
	})
}

func run(ctx context.Context, directory string) error {
	c, err := newClient()
	if err != nil {
		return err
	}
	workload, build := uuid.NewString(), uuid.NewString()
	put := &artifacts.PutBuildRequest{BuildId: build, Team: c.team, EndsWithWorkloadId: workload}
	if _, err := c.owners.PutBuild(ctx, put); err != nil {
		return err
	}

	artifact, digest, err := c.upload(ctx, directory, build)
	if err != nil {
		return err
	}
	fmt.Printf("uploaded: %s, digest %x\n", artifact, digest)

	if err := c.submit(ctx, workload, c.spec(artifact, build)); err != nil {
		return err
	}
	fmt.Printf("submitted: %s\n", workload)

	event, err := c.watch(ctx, workload, 0, func(event *scheduler.WatchResponse) bool { return event.GetRunning() != nil })
	if err != nil {
		return err
	}
	output, connections, err := c.attach(ctx, event.GetRunning().Location)
	if err != nil {
		return err
	}
	var expected bytes.Buffer
	for number := range 40_000 {
		fmt.Fprintf(&expected, "line %06d\n", number)
	}
	if !bytes.Equal(output.stdout, expected.Bytes()) || !bytes.Equal(output.stderr, make([]byte, errorBytes)) {
		return errors.New("not each byte once, in order")
	}
	if connections < 2 {
		return errors.New("the connection was not broken")
	}
	sum := sha256.Sum256(output.stdout)
	fmt.Printf("attached: %d and %d bytes over %d connections, sha256 %x\n", len(output.stdout), len(output.stderr), connections, sum)

	event, err = c.watch(ctx, workload, event.Revision, func(event *scheduler.WatchResponse) bool { return event.GetFinished() != nil })
	if err != nil {
		return err
	}
	finished := event.GetFinished()
	if finished.Outcome != scheduler.Outcome_OUTCOME_SUCCEEDED {
		return fmt.Errorf("%v", finished)
	}

	files, copied, err := c.download(ctx, finished.Outputs[0].ArtifactId)
	if err != nil {
		return err
	}
	if !bytes.Equal(copied, finished.Outputs[0].Digest) {
		return errors.New("the output has another digest than was said")
	}
	originals, err := readAll(directory)
	if err != nil {
		return err
	}
	if !maps.EqualFunc(files, originals, bytes.Equal) {
		return errors.New("the copy differs from the original")
	}
	fmt.Printf("downloaded: %d files, digest %x\n", len(files), copied)

	// docs:explain
	impossible := c.spec(artifact, build, "no-such-worker")
	err = c.submit(ctx, uuid.NewString(), impossible)
	info := errorInfo(err)
	if status.Code(err) != codes.FailedPrecondition || info.GetReason() != "NO_COMPATIBLE_WORKER" {
		return fmt.Errorf("not refused as it should: %w", err)
	}
	fmt.Printf("refused: %s of %s, %v\n", info.Reason, info.Domain, info.Metadata)

	about := &scheduler.ExplainRequest{Subject: &scheduler.ExplainRequest_Spec{Spec: impossible}}
	explained, err := c.placements.Explain(ctx, about)
	if err != nil {
		return err
	}
	if explained.Verdict != scheduler.Verdict_VERDICT_NEVER {
		return fmt.Errorf("%v", explained)
	}
	fmt.Printf("explained: never, unless %s\n", strings.Join(explained.UnblockedBy, " or "))
	// docs:end
	return nil
}

func main() {
	var err error
	if os.Args[1] == "ci" {
		err = runCore(context.Background())
	} else {
		err = run(context.Background(), os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}
